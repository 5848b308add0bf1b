"""A distribution under test with its dense moments, and rules for its members."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, StudentT, kl_divergence

from pyro_structvi.testing.contracts import Contract, is_defined
from pyro_structvi.testing.noise import UnitDraws, assert_mean, draw_with_noise, unit_draws
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight

SAMPLES = 400  # of draws without exact moments
Moment = Callable[[Any], Tensor]
KL = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A distribution in double precision whose tensors are leaves, with dense moments."""

    contract: Contract
    q: Any
    mean: Tensor
    covariance: Tensor
    is_normal: bool
    kl: KL | None
    shared: Tensor | None  # the covariance of noise that all positions share, if it is known

    @classmethod
    def of(
        cls,
        contract: Contract,
        q: Any,
        covariance: Moment | None,
        mean: Moment | None,
        kl: KL | None,
        shared: Moment | None,
    ) -> "Subject":
        """Read the moments off the draws, unless they are given."""
        drawn = linear(q.rsample)
        own_mean, own_covariance = q.mean, q.covariance_matrix
        if drawn is not None:
            size, count = q.event_shape.numel(), q.batch_shape.numel()
            whole = drawn.covariance.reshape(count, size, count, size)
            own_mean = drawn.mean
            own_covariance = whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
            own_covariance = own_covariance.reshape(*q.batch_shape, size, size)
            apart = ~torch.eye(count, dtype=torch.bool)[:, None, :, None]
            rule = "weights of a batch are drawn independently of each other"
            contract.close(rule, whole * apart, torch.zeros_like(whole))
        elif scales_noise(q):
            contract.fail("draws are `loc + scale_noise(e)`", "a linear function", "another one")
        return cls(
            *(contract, q),
            own_mean if mean is None else mean(q),
            own_covariance if covariance is None else covariance(q),
            drawn is not None,
            kl,
            None if shared is None else shared(q),
        )

    @property
    def event_dim(self) -> int:
        """The number of dimensions of a weight."""
        return len(self.q.event_shape)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """The mean ``(*batch, out, in)`` and the covariance ``(*batch, out, in, out, in)``."""
        mean = self.q.as_matrix(self.mean)
        return mean, self.covariance.reshape(*self.q.batch_shape, *mean.shape[-2:] * 2)

    def dense(self) -> MultivariateNormal:
        """Return the dense normal over the row-major weight."""
        return MultivariateNormal(self.mean.flatten(-self.event_dim), self.covariance)

    def check_draws(
        self, name: str, draw: Callable[..., Tensor], mean: Tensor, covariance: Tensor
    ) -> None:
        """Check moments of draws of independent examples with events of E elements."""
        if self.is_normal:
            found = linear(draw)
            if found is None:
                rule = f"{name} are linear in normal noise, like the weight"
                return self.contract.fail(rule, True, False)
            self.contract.close(f"{name} have their mean", found.mean, mean.expand_as(found.mean))
            blocks = covariance.reshape(-1, *covariance.shape[-2:])
            same = torch.block_diag(*torch.ones_like(blocks.detach()))
            between = torch.where(same > 0, torch.zeros(()), found.covariance)
            rule = f"{name} are independent between weights of a batch, or examples"
            self.contract.close(rule, between, torch.zeros_like(between), False)
            rule = f"{name} have their covariance, A A' for mean + A e"
            self.contract.close(rule, found.covariance, torch.block_diag(*blocks))
            return None
        with torch.no_grad():
            draws = torch.stack([draw() for _ in range(SAMPLES)]).flatten(1)
            squares = (draws - mean.flatten()).square()
            try:
                assert_mean(draws, mean)
                assert_mean(squares, covariance.diagonal(dim1=-2, dim2=-1))
            except AssertionError as error:
                self.contract.fail(f"{name} have mean and variance", "no significant error", error)
        return None


def scales_noise(q: Any) -> bool:
    """Whether a distribution defines ``scale_noise``."""
    return isinstance(q, GaussianWeight) and type(q).scale_noise is not GaussianWeight.scale_noise


def linear(draw: Callable[..., Tensor]) -> UnitDraws | None:
    """Return a draw as a linear function of normal noise, None if it is not one."""
    try:
        return unit_draws(draw)
    except AssertionError:
        return None


def check_moments(s: Subject) -> None:
    """Check moments against the distribution of draws."""
    q, close = s.q, s.contract.close
    variance = s.covariance.diagonal(dim1=-2, dim2=-1).reshape(s.mean.shape)
    close("`mean` is the mean of draws", q.mean, s.mean)
    close("`covariance_matrix` is the covariance of draws", q.covariance_matrix, s.covariance)
    close("`variance` is the diagonal of the covariance", q.variance, variance)
    close("`stddev` is the root of the variance", q.stddev, variance.sqrt(), False)
    trace = variance.flatten(-s.event_dim).sum(-1)
    close("`variance_sum` is the trace of the covariance", q.variance_sum, trace)
    if isinstance(q, IndependentWeight):
        off = s.covariance - torch.diag_embed(s.covariance.diagonal(dim1=-2, dim2=-1))
        is_diagonal = bool(off.abs().max() <= 1e-12 * s.covariance.abs().max())
        s.contract.equal("an `IndependentWeight` needs a diagonal covariance", is_diagonal, True)


def check_draws(s: Subject) -> None:
    """Check draws and their gradients."""
    q = s.q
    s.contract.equal("`rsample` has gradients", q.rsample().requires_grad, True)
    s.contract.equal("`sample` has no gradients", q.sample().requires_grad, False)
    s.check_draws("draws", q.rsample, s.mean, s.covariance)
    if s.is_normal and not q.batch_shape:
        several = s.covariance.expand(3, *s.covariance.shape)
        s.check_draws(
            "several draws", lambda: torch.cat([q.rsample((2,)), q.rsample((1,))]), s.mean, several
        )


def check_gaussian(s: Subject) -> None:
    """``scale_noise``, ``whiten``, ``mahalanobis`` and ``log_det_covariance``, if defined."""
    q, close = s.q, s.contract.close
    if not isinstance(q, GaussianWeight) or not s.is_normal:
        return
    log_det = torch.linalg.slogdet(s.covariance).logabsdet
    close("`log_det_covariance` is the log determinant", q.log_det_covariance, log_det)
    for sample_shape in ((), (5,), (5, 2)):
        away = torch.randn(*sample_shape, *s.mean.shape)
        flat = away.flatten(-s.event_dim)
        solved = torch.linalg.solve(s.covariance, flat.unsqueeze(-1)).squeeze(-1)
        distance = (flat * solved).sum(-1)
        close("`mahalanobis(d)` is d' Sigma^-1 d", q.mahalanobis(away), distance)
        if not scales_noise(q):
            continue
        noise = torch.randn(*sample_shape, *q.batch_shape, *q.noise_shape)
        scaled = q.scale_noise(noise)
        drawn, _ = draw_with_noise(partial(q.rsample, sample_shape), noise.flatten())
        close("`rsample` draws `loc + scale_noise(e)`", drawn, q.loc + scaled)
        if type(q).whiten is not GaussianWeight.whiten:
            close("`whiten` inverts `scale_noise`", q.whiten(scaled), noise, False)


def check_densities(s: Subject) -> None:
    """Check ``log_prob`` and ``entropy`` against the dense normal."""
    q, close = s.q, s.contract.close
    if not s.is_normal:
        return
    dense = s.dense()
    for sample_shape in ((), (5,)):
        value = torch.randn(*sample_shape, *s.mean.shape)
        expected = dense.log_prob(value.flatten(-s.event_dim))
        close("`log_prob` has the value of the dense normal", q.log_prob(value), expected)
    close("`entropy` has the value of the dense normal", q.entropy(), dense.entropy())
    if q._validate_args:
        for kind, value, start in (
            ("another shape", torch.zeros(*s.mean.shape, 2), "`value` must have shape"),
            ("NaN", torch.full(s.mean.shape, torch.nan), "`value` holds"),
        ):
            s.contract.refuses(f"`log_prob` refuses {kind}", partial(q.log_prob, value), start)


def check_kl(s: Subject) -> None:
    """Check KL divergences from independent normals with all forms of their arguments."""
    q, shape, batch = s.q, s.mean.shape, len(s.q.batch_shape)
    if not s.is_normal:
        return
    one, loc, scale = torch.ones(shape), torch.randn(shape), torch.rand(shape) + 0.5
    of_weight = scale.flatten(batch)[..., 0].reshape(*q.batch_shape, *(1 for _ in q.event_shape))
    of_rows = of_weight
    if s.event_dim > 1:
        of_rows = scale[(0,) * batch].flatten(1)[:, 0].reshape(-1, *(1 for _ in q.event_shape[1:]))
    priors: dict[str, Normal] = {
        "of one scale": Normal(torch.tensor(0.3), 0.7),
        "with a mean": Normal(loc, scale),
        "of one scale for each weight": Normal(0 * of_weight, of_weight),
        "of one scale for each output": Normal(0 * of_rows, of_rows),
    }
    for name, prior_of in priors.items():
        plain = prior_of.expand(shape)
        prior_loc, prior_scale = one * prior_of.mean, one * prior_of.stddev
        if s.kl is not None:
            expected = s.kl(q, prior_loc, prior_scale)
        else:
            covariance = torch.diag_embed(prior_scale.flatten(-s.event_dim).square())
            dense = MultivariateNormal(prior_loc.flatten(-s.event_dim), covariance)
            expected = kl_divergence(s.dense(), dense)
        rule = f"`kl_divergence(q, p)` is E_q[log q - log p], for a normal p {name}"
        for prior in (Independent(plain, s.event_dim), plain):
            s.contract.close(rule, kl_divergence(q, prior), expected)
    whole = Independent(Normal(loc[(0,) * batch], scale[(0,) * batch]), s.event_dim)
    expected = kl_divergence(q, whole.expand(q.batch_shape))
    s.contract.close("one prior serves a batch of weights", kl_divergence(q, whole), expected)
    if isinstance(q, GaussianWeight):
        student = StudentT(3.0, one, 1.0)
        for other in (student, Independent(student, s.event_dim)):
            is_closed = is_defined(partial(kl_divergence, q, other))
            s.contract.equal("a KL without closed form is refused", is_closed, False)
