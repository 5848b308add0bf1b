"""A distribution under test with its dense moments, and rules for its members."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, StudentT, kl_divergence

from pyro_structvi.testing.contracts import Contract, fresh, is_defined, with_leaves
from pyro_structvi.testing.noise import UnitDraws, assert_mean, draw_with_noise, unit_draws
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight

SAMPLES = 400  # of draws without exact moments
Moment = Callable[[Any], Tensor]
KL = Callable[[Any, Tensor, Tensor], Tensor]


class Subject(Contract):
    """A copy of a given distribution in double precision whose tensors are leaves, with dense moments.

    Moments are read off the draws, unless they are given. ``shared`` is the covariance of noise that all
    positions share, if it is known.
    """

    def __init__(self, given: Any, covariance: Any, mean: Any, kl: KL | None, shared: Any) -> None:
        q, leaves = with_leaves(fresh(given), Tensor.double)
        super().__init__(type(given).__name__, leaves)
        self.given, self.q, self.event_dim, self.kl = given, q, len(q.event_shape), kl
        self.shared = None if shared is None else shared(q)
        drawn = linear(q.rsample)
        self.is_normal = drawn is not None
        self.mean, self.covariance = q.mean, q.covariance_matrix
        if drawn is not None:
            size, count = q.event_shape.numel(), q.batch_shape.numel()
            whole = drawn.covariance.reshape(count, size, count, size)
            self.mean = drawn.mean
            of_each = whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
            self.covariance = of_each.reshape(*q.batch_shape, size, size)
            apart = ~torch.eye(count, dtype=torch.bool)[:, None, :, None]
            rule = "weights of a batch are drawn independently of each other"
            self.close(rule, whole * apart, torch.zeros_like(whole))
        elif scales_noise(q):
            self.fail("draws are `loc + scale_noise(e)`", "a linear function", "another one")
        if mean is not None:
            self.mean = mean(q)
        if covariance is not None:
            self.covariance = covariance(q)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """The mean ``(*batch, out, in)`` and the covariance ``(*batch, out, in, out, in)``."""
        mean = self.q.as_matrix(self.mean)
        return mean, self.covariance.reshape(*self.q.batch_shape, *mean.shape[-2:] * 2)

    def compare(self, rule: str, found: Any, mean: Tensor, covariance: Tensor) -> None:
        """Compare a distribution with dense moments; the rule has a place for the member."""
        variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        self.close(rule.format("`mean`"), found.mean, mean)
        self.close(rule.format("`variance`"), found.variance, variance)
        self.close(rule.format("`covariance_matrix`"), found.covariance_matrix, covariance)

    def compare_densities(self, rule: str, found: Any, mean: Tensor, covariance: Tensor) -> None:
        """Compare the density with a dense normal's, if the weight is normal."""
        if not self.is_normal:
            return
        event_dim = len(found.event_shape)
        dense = MultivariateNormal(mean.flatten(-event_dim), covariance)
        for sample_shape in ((), (5,)):
            value = torch.randn(*sample_shape, *mean.shape)
            expected = dense.log_prob(value.flatten(-event_dim))
            self.close(rule.format("`log_prob`"), found.log_prob(value), expected)
        self.close(rule.format("`entropy`"), found.entropy(), dense.entropy())

    def compare_draws(
        self, name: str, draw: Callable[..., Tensor], mean: Tensor, covariance: Tensor
    ) -> None:
        """Compare draws of independent examples, with events of E elements, with their moments."""
        if self.is_normal:
            found = linear(draw)
            if found is None:
                rule = f"{name} are linear in normal noise, like the weight"
                return self.fail(rule, True, False)
            self.close(f"{name} have their mean", found.mean, mean.expand_as(found.mean))
            blocks = covariance.reshape(-1, *covariance.shape[-2:])
            same = torch.block_diag(*torch.ones_like(blocks.detach()))
            between = torch.where(same > 0, torch.zeros(()), found.covariance)
            rule = f"{name} are independent between weights of a batch, or examples"
            self.close(rule, between, torch.zeros_like(between), False)
            rule = f"{name} have their covariance, A A' for mean + A e"
            self.close(rule, found.covariance, torch.block_diag(*blocks))
            return None
        with torch.no_grad():
            draws = torch.stack([draw() for _ in range(SAMPLES)]).flatten(1)
            squares = (draws - mean.flatten()).square()
            try:
                assert_mean(draws, mean)
                assert_mean(squares, covariance.diagonal(dim1=-2, dim2=-1))
            except AssertionError as error:
                self.fail(f"{name} have mean and variance", "no significant error", error)
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
    """Check moments against draws."""
    q = s.q
    variance = s.covariance.diagonal(dim1=-2, dim2=-1).reshape(s.mean.shape)
    s.compare("{} agrees with the draws", q, s.mean, s.covariance)
    s.close("`stddev` is the root of the variance", q.stddev, variance.sqrt(), False)
    trace = variance.flatten(-s.event_dim).sum(-1)
    s.close("`variance_sum` is the trace of the covariance", q.variance_sum, trace)
    if isinstance(q, IndependentWeight):
        off = s.covariance - torch.diag_embed(s.covariance.diagonal(dim1=-2, dim2=-1))
        is_diagonal = bool(off.abs().max() <= 1e-12 * s.covariance.abs().max())
        s.equal("an `IndependentWeight` needs a diagonal covariance", is_diagonal, True)


def check_draws(s: Subject) -> None:
    """Check draws and their gradients."""
    q = s.q
    s.equal("`rsample` has gradients", q.rsample().requires_grad, True)
    s.equal("`sample` has no gradients", q.sample().requires_grad, False)
    s.compare_draws("draws", q.rsample, s.mean, s.covariance)
    if s.is_normal and not q.batch_shape:
        several = s.covariance.expand(3, *s.covariance.shape)
        s.compare_draws(
            "several draws", lambda: torch.cat([q.rsample((2,)), q.rsample((1,))]), s.mean, several
        )


def check_gaussian(s: Subject) -> None:
    """``scale_noise``, ``whiten``, ``mahalanobis`` and ``log_det_covariance``, if defined."""
    q = s.q
    if not isinstance(q, GaussianWeight) or not s.is_normal:
        return
    log_det = torch.linalg.slogdet(s.covariance).logabsdet
    s.close("`log_det_covariance` is the log determinant", q.log_det_covariance, log_det)
    for sample_shape in ((), (5,), (5, 2)):
        away = torch.randn(*sample_shape, *s.mean.shape)
        flat = away.flatten(-s.event_dim)
        solved = torch.linalg.solve(s.covariance, flat.unsqueeze(-1)).squeeze(-1)
        distance = (flat * solved).sum(-1)
        s.close("`mahalanobis(d)` is d' Sigma^-1 d", q.mahalanobis(away), distance)
        if not scales_noise(q):
            continue
        noise = torch.randn(*sample_shape, *q.batch_shape, *q.noise_shape)
        scaled = q.scale_noise(noise)
        drawn, _ = draw_with_noise(partial(q.rsample, sample_shape), noise.flatten())
        s.close("`rsample` draws `loc + scale_noise(e)`", drawn, q.loc + scaled)
        if type(q).whiten is not GaussianWeight.whiten:
            s.close("`whiten` inverts `scale_noise`", q.whiten(scaled), noise, False)


def check_densities(s: Subject) -> None:
    """Check ``log_prob`` and ``entropy``."""
    s.compare_densities("{} agrees with the draws", s.q, s.mean, s.covariance)
    if s.is_normal and s.q._validate_args:
        for kind, value, start in (
            ("another shape", torch.zeros(*s.mean.shape, 2), "`value` must have shape"),
            ("NaN", torch.full(s.mean.shape, torch.nan), "`value` holds"),
        ):
            s.refuses(f"`log_prob` refuses {kind}", partial(s.q.log_prob, value), start)


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
    dense = MultivariateNormal(s.mean.flatten(batch), s.covariance)
    for name, prior_of in priors.items():
        plain = prior_of.expand(shape)
        prior_loc, prior_scale = one * prior_of.mean, one * prior_of.stddev
        if s.kl is not None:
            expected = s.kl(q, prior_loc, prior_scale)
        else:
            covariance = torch.diag_embed(prior_scale.flatten(batch).square())
            expected = kl_divergence(
                dense, MultivariateNormal(prior_loc.flatten(batch), covariance)
            )
        rule = f"`kl_divergence(q, p)` is E_q[log q - log p], for a normal p {name}"
        for prior in (Independent(plain, s.event_dim), plain):
            s.close(rule, kl_divergence(q, prior), expected)
    whole = Independent(Normal(loc[(0,) * batch], scale[(0,) * batch]), s.event_dim)
    expected = kl_divergence(q, whole.expand(q.batch_shape))
    s.close("one prior serves a batch of weights", kl_divergence(q, whole), expected)
    if isinstance(q, GaussianWeight):
        student = StudentT(3.0, one, 1.0)
        for other in (student, Independent(student, s.event_dim)):
            is_closed = is_defined(partial(kl_divergence, q, other))
            s.equal("a KL without closed form is refused", is_closed, False)
