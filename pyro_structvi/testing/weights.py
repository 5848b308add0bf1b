"""A distribution under test with its dense moments, and rules for its members."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, StudentT, kl_divergence

from pyro_structvi.sites.site_posterior import median_of
from pyro_structvi.testing.contracts import Contract, Leaf, fresh, is_defined, with_leaves
from pyro_structvi.testing.noise import UnitDraws, draw_with_noise, unit_draws
from pyro_structvi.weights.arguments import orthogonal
from pyro_structvi.weights.site_distributions import (
    JoinedPrior,
    normal_cross_entropy,
    normal_quantiles,
    quantiles,
)
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight

SAMPLES = 400  # of draws without exact moments
MANY, GROUPS = 4000, 100  # at once
MOST_DRAWS = 20_000  # of densities and shares, without covariances
SHARE = 0.8  # of the covariance, of a narrower normal
COLUMNS, BIAS = (..., slice(-1)), (..., -1)  # of a weight that is joined with its bias
MOST = 20.0  # second moment of a ratio of densities whose mean is estimated
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
        for name, value in vars(given).items():
            if isinstance(value, bool | int | float | str) and not name.startswith("_"):
                self.equal(f"`expand` keeps the option `{name}`", getattr(q, name, None), value)
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
    def is_regular(self) -> bool:
        """Whether the covariance has an inverse."""
        return narrow_normal(self.mean, self.covariance) is not None

    @property
    def has_density(self) -> bool:
        """Whether the distribution has a density with respect to all elements."""
        return self.is_regular and has_density(self.q)

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
        try:
            dense = MultivariateNormal(mean.flatten(-event_dim), covariance)
        except ValueError as error:  # of torch
            inverse = "a covariance with an inverse, as a normal with a density has"
            self.fail(rule.format("`log_prob`"), inverse, error)
        for sample_shape in ((), (5,), (5, 2)):
            value = torch.randn(*sample_shape, *mean.shape).requires_grad_()
            expected, s = dense.log_prob(value.flatten(-event_dim)), self.with_leaf("value", value)
            s.close(rule.format("`log_prob`"), found.log_prob(value), expected)
        self.close(rule.format("`entropy`"), found.entropy(), dense.entropy())

    def compare_draws(
        self, name: str, draw: Callable[..., Tensor], mean: Tensor, covariance: Tensor
    ) -> None:
        """Compare draws of independent examples, with events of E elements, with their moments."""
        if self.is_normal:
            found = linear(draw)
            if found is None:
                rule = f"{name} are linear in normal noise, like the weight"
                self.fail(rule, True, False)
            self.close(f"{name} have their mean", found.mean, mean.expand_as(found.mean))
            same = dense_of_batch(torch.ones_like(covariance.detach()))
            between = torch.where(same > 0, torch.zeros(()), found.covariance)
            rule = f"{name} are independent between weights of a batch, or examples"
            self.close(rule, between, torch.zeros_like(between), False)
            rule = f"{name} have their covariance, A A' for mean + A e"
            self.close(rule, found.covariance, dense_of_batch(covariance))
            return
        with torch.no_grad():
            draws = torch.stack([draw() for _ in range(SAMPLES)])
        self.compare_samples(name, draws, mean, covariance)

    def compare_samples(self, name: str, draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
        """Compare independent draws ``(n, *batch, *event)`` with moments, for batches independent."""
        away = (draws - mean).flatten(1)
        self.mean_of(f"{name} have their mean", away, 0 * away[0])
        products = away.unsqueeze(-1) * away.unsqueeze(-2)
        rule = f"{name} have their covariance, and are independent of each other"
        self.mean_of(rule, products, dense_of_batch(covariance))


def dense_of_batch(covariance: Tensor) -> Tensor:
    """Return the covariance of independent weights of a batch, given ``(*batch, D, D)``."""
    return torch.block_diag(*covariance.reshape(-1, *covariance.shape[-2:]))


def narrow_normal(mean: Tensor, covariance: Tensor) -> MultivariateNormal | None:
    """Return dense normals with a share of a covariance ``(*batch, D, D)``; None if it is singular."""
    factor, failed = torch.linalg.cholesky_ex(SHARE * covariance.detach())
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    least = (100 * torch.finfo(factor.dtype).eps) ** 0.5 * diagonal.amax(-1)  # above rounding
    if failed.any() or bool((diagonal.amin(-1) <= least).any()):
        return None
    return MultivariateNormal(mean.detach().reshape(diagonal.shape), scale_tril=factor)


def has_density(q: Any) -> bool:
    """Whether a distribution defines ``log_prob`` and ``entropy``."""
    return is_defined(lambda: (q.log_prob(q.mean), q.entropy()))


def has_image(q: Any) -> bool:
    """Whether a distribution defines the distribution of outputs."""
    x = torch.zeros_like(q.mean[(0,) * len(q.batch_shape)][0].flatten())
    return is_defined(lambda: q.image(x))


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
    s.close("`loc` is the mean, which layers apply to their inputs", q.loc, s.mean)
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
    torch.manual_seed(1)
    sample = q.sample()
    torch.manual_seed(1)
    s.close("`sample` draws as `rsample`", sample, q.rsample(), False)
    if not q.batch_shape:
        several = s.covariance.expand(4, *s.covariance.shape)
        draws = lambda: q.rsample((2, 2)).flatten(0, 1)  # noqa: E731
        s.compare_draws("several draws", draws, s.mean.expand(4, *s.mean.shape), several)
    if s.is_normal:
        s.compare_draws("draws", q.rsample, s.mean, s.covariance)
    else:
        with torch.no_grad():
            s.compare_samples("draws", q.rsample(torch.Size([MANY])), s.mean, s.covariance)


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
    if not s.is_normal and s.has_density:
        check_density(s, s.q, s.mean, s.covariance)
    if s.is_normal and s.q._validate_args:
        for kind, value, start in (
            (
                "another shape",
                torch.zeros(*s.mean.shape, 1 + s.mean.shape[-1]),
                "`value` must have shape",
            ),
            ("NaN", torch.full(s.mean.shape, torch.nan), "`value` holds"),
        ):
            s.refuses(f"`log_prob` refuses {kind}", partial(s.q.log_prob, value), start)


def check_kl(s: Subject) -> None:
    """Check KL divergences from independent normals with all forms of their arguments."""
    q, shape, batch = s.q, s.mean.shape, len(s.q.batch_shape)
    # A KL for a standard normal alone is none.
    has_kl = s.has_density and is_defined(partial(kl_divergence, q, Normal(0.3 + 0 * q.mean, 0.7)))
    if not s.is_normal and not has_kl:
        return
    loc, scale = torch.randn(shape).requires_grad_(), (torch.rand(shape) + 0.5).requires_grad_()
    s = s.with_leaf("loc of p", loc).with_leaf("scale of p", scale)
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

    def exact(prior: Normal) -> Tensor:
        if s.kl is not None:
            return s.kl(q, prior.mean, prior.stddev)
        if not s.is_normal:
            return normal_cross_entropy(q, prior) - q.entropy()
        variances = torch.diag_embed(prior.variance.flatten(batch))
        return kl_divergence(dense, MultivariateNormal(prior.mean.flatten(batch), variances))

    for name, prior_of in priors.items():
        plain = prior_of.expand(shape)
        rule = f"`kl_divergence(q, p)` is E_q[log q - log p], for a normal p {name}"
        for prior in (Independent(plain, s.event_dim), plain):
            s.close(rule, kl_divergence(q, prior), exact(plain))
    if not batch and s.event_dim == 2 and shape[-1] > 1:
        joined = JoinedPrior(*(Normal(loc[cut], scale[cut]) for cut in (COLUMNS, BIAS)))
        rule = "a joined prior has the KL of the priors of weight and bias"
        s.close(rule, kl_divergence(q, joined), exact(priors["with a mean"]))
    whole = Independent(Normal(loc[(0,) * batch], scale[(0,) * batch]), s.event_dim)
    expected = kl_divergence(q, whole.expand(q.batch_shape))
    s.close("one prior serves a batch of weights", kl_divergence(q, whole), expected)
    if isinstance(q, GaussianWeight):
        _check_kl_between(s, dense)
        student = StudentT(3.0, torch.ones(shape), 1.0)
        for other in (student, Independent(student, s.event_dim)):
            is_closed = is_defined(partial(kl_divergence, q, other))
            s.equal("a KL without closed form is refused", is_closed, False)


def _check_kl_between(s: Subject, dense: MultivariateNormal) -> None:
    """Check the KL to another normal of the class, as for a prior that is an earlier posterior."""
    if s.kl is not None or any(leaf.support is orthogonal for leaf in s.leaves):
        return
    p, _ = with_leaves(fresh(s.q), lambda own: 1.25 * own)
    expected = kl_divergence(
        dense, MultivariateNormal(p.mean.flatten(-s.event_dim), p.covariance_matrix)
    )
    rule = "the KL between two of the class is the KL of dense normals"
    s.close(rule, kl_divergence(s.q, p), expected)


# ---- draws that are not linear in normal noise -----------------------------------------------------


def check_density(s: Contract, q: Any, mean: Tensor, covariance: Tensor) -> None:
    """Compare a density with draws, where an inverse of the covariance exists.

    Its derivatives by the leaves have the mean zero over draws, and a narrower normal p has
    ``E_q[p / q] = 1``.
    """
    dense, event_dim = narrow_normal(mean, covariance), len(q.event_shape)
    if dense is None or not is_defined(lambda: q.log_prob(q.sample().clone())):
        return
    value = q.sample().clone().requires_grad_()
    way = torch.randn_like(value)
    moved = lambda size: {"log_prob(value)": q.log_prob(value + size * way)}  # noqa: E731
    Contract(s.owner, (Leaf("value", value, None),)).slopes(moved, [way])
    draws = q.sample(torch.Size([MOST_DRAWS]))
    log_density = q.log_prob(draws).detach()
    shape = tuple(log_density.shape)
    s.equal("`log_prob` has the shape (*sample, *batch)", shape, (MOST_DRAWS, *q.batch_shape))
    if is_defined(q.entropy):
        s.mean_of("`entropy` is E_q[-log q]", -log_density, q.entropy())
    values = [leaf.value for leaf in s.leaves]
    groups = [q.log_prob(own).sum() for own in draws.unflatten(0, (GROUPS, -1))]
    scores = [
        torch.autograd.grad(own, values, retain_graph=True, materialize_grads=True)
        for own in groups
    ]
    for leaf, each in zip(s.leaves, zip(*scores, strict=True), strict=True):
        score = torch.stack([leaf.along(own) for own in each])
        rule = f"the derivative of `log_prob` by `{leaf.name}` has mean zero over draws"
        s.mean_of(rule, score, 0 * score[0])
    ratio = (dense.log_prob(draws.flatten(-event_dim)) - log_density).exp()
    at = dense.sample(torch.Size([MOST_DRAWS]))
    second = (dense.log_prob(at) - q.log_prob(at.reshape(draws.shape))).detach().exp().mean(0)
    # Where p has more than q, as between two modes, the mean is not estimated.
    if bool((second < MOST * ratio.mean(0)).all()):
        rule = "`log_prob` is the log density of the draws: E_q[p / q] = 1 for a normal p"
        s.mean_of(rule, ratio, torch.ones(q.batch_shape))


@torch.no_grad()
def check_quantiles(s: Subject) -> None:
    """Check quantiles, if defined, by those of normals or by draws."""
    q, levels = s.q, torch.tensor([0.1, 0.5, 0.9])
    if not is_defined(lambda: quantiles(q, levels)) or not s.is_regular:
        return
    found = quantiles(q, levels)
    if not getattr(q, "is_mixture", False):
        s.close("the median, of `icdf` or the mean, is the quantile 1/2", median_of(q), found[1])
    if s.is_normal:
        deviation = s.covariance.diagonal(dim1=-2, dim2=-1).reshape(s.mean.shape).sqrt()
        expected = normal_quantiles(s.mean, deviation, levels)
        s.close("`quantiles` agree with the draws", found, expected)
        return
    draws = q.rsample(torch.Size([MOST_DRAWS])).unsqueeze(1)
    share = levels.reshape(-1, *(1 for _ in s.mean.shape)).expand_as(found)
    s.mean_of("`quantiles` have their shares of draws below them", (draws <= found).double(), share)
