"""Points, auxiliary variables, joined priors; KL divergences from independent priors, and quantiles."""

import math
from collections.abc import Iterator
from functools import singledispatch
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pyro.distributions import Delta, TransformedDistribution
from pyro.distributions import Distribution as PyroDistribution
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Laplace, Normal, constraints, register_kl
from torch.distributions.kl import kl_divergence
from torch.distributions.transforms import ReshapeTransform
from torch.special import ndtri

from pyro_structvi._checks import check_finite, check_shape, checked, validates
from pyro_structvi.linalg.matrices import autocast_off, event_sum, shrink
from pyro_structvi.weights.arguments import as_expanded, as_size, check_parameters, check_value
from pyro_structvi.weights.torch_distributions import base_of, example_of
from pyro_structvi.weights.weight_distribution import (
    GaussianWeight,
    IndependentWeight,
    WeightDistribution,
)

_FAR = 40.0  # standard deviations, at which a normal's density is zero in double precision


class PointMass(Delta):
    r"""A point mass whose divergence from a prior p is :math:`E[-\log p(w)]`, in nats.

    This is the KL without the infinite entropy of a point, so that a guide of points has the loss of a
    maximum a posteriori estimate. ``log_prob`` is zero at the value.

    Args:
        value: The value, ``(*batch, *event)``.
        event_dim: The number of trailing dimensions of the event.
        mean: The mean of the normal that the value was sampled from, if it was.
        variance: Its variance.
        validate_args: Whether to check arguments; Pyro's setting when None.

    Raises:
        ValueError: If a tensor is not finite, or of another shape than ``value``, or if ``event_dim`` is
            negative or larger than the dimensions of the value.

    Example:
        >>> from pyro.distributions import Normal
        >>> from torch.distributions import kl_divergence
        >>> q = PointMass(torch.tensor([1.0, 2.0]), event_dim=1)
        >>> prior = Normal(torch.zeros(2), 1.0).to_event(1)
        >>> kl_divergence(q, prior) == -prior.log_prob(q.v)
        tensor(True)
    """

    v: Tensor

    @checked
    def __init__(
        self,
        value: Tensor,
        event_dim: int,
        mean: Tensor | None = None,
        variance: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if validates(validate_args):
            given = {"value": value, "mean": mean, "variance": variance}
            tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
            check_parameters(self, tensors, event_dim)
            for name, tensor in tensors.items():
                check_finite(name, tensor)
                check_shape(name, tensor, value.shape, "that of `value`")
            if variance is not None and bool((variance < 0).any()):
                raise ValueError("`variance` must be at least 0 everywhere, but is not.")
        super().__init__(value, event_dim=event_dim, validate_args=False)
        self._mean, self._variance = mean, variance

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the value; a view of a parameter, which a module would register."""
        return self.v.view_as(self.v) if isinstance(self.v, nn.Parameter) else self.v

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        draw: Tensor = super().rsample(as_size("sample_shape", sample_shape))
        return draw.clone()

    @property
    def mean(self) -> Tensor:
        return self.v if self._mean is None else self._mean

    @property
    def mode(self) -> Tensor:
        return self.v

    @property
    def variance(self) -> Tensor:
        """The variance of each element, of the value's shape."""
        return torch.zeros_like(self.v) if self._variance is None else self._variance

    @property
    def variance_sum(self) -> Tensor:
        if self._variance is None:
            return self.v.new_zeros(self.batch_shape)
        return event_sum(self._variance, self.event_dim)

    @property
    def is_known(self) -> bool:
        return self._variance is None

    def expand(self, batch_shape: Any, _instance: Any = None) -> "PointMass":
        shape = as_expanded(batch_shape, self.batch_shape) + self.event_shape
        mean, variance = (
            None if m is None else m.expand(shape) for m in (self._mean, self._variance)
        )
        return PointMass(self.v.expand(shape), self.event_dim, mean, variance, validate_args=False)


@register_kl(PointMass, PyroDistribution)  # Pyro has a rule for Delta and this class
def _kl_point_mass(q: PointMass, p: Any) -> Tensor:
    """The expected negative log density, in closed form or at a fixed value."""
    base = base_of(p)
    if isinstance(base, Normal):
        return normal_cross_entropy(q, base)
    if not q.is_known:
        return event_sum(expected_neg_log_prob(q.mean, q.variance, p), q.event_dim)
    nats: Tensor = -p.log_prob(q.v)
    return event_sum(nats, nats.dim() - len(q.batch_shape))


class Auxiliary(TorchDistribution):
    r"""The posterior of an auxiliary variable of a guide, with ``log_prob`` relative to its prior.

    With an auxiliary variable U and weights W the evidence is bounded by :math:`E[\log p(y, W) +
    \log r(U \mid W) - \log q(W, U)]`. If r follows from a joint prior p(U) p(W | U) with the marginal
    p(W), then U contributes ``log q(U) - log p(U)`` to the KL, and W contributes ``log q(W | U) -
    log p(W | U)``.

    Without a prior the variable is a part of W, and the site of W has all of ``log p(W)``.

    Args:
        posterior: The distribution of the variable in the guide.
        prior: Its distribution in the joint prior, or None.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    @checked
    def __init__(self, posterior: Distribution, prior: Distribution | None = None) -> None:
        self.posterior, self.prior = posterior, prior
        super().__init__(posterior.batch_shape, posterior.event_shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        return self.posterior.support

    @property
    def mean(self) -> Tensor:
        return self.posterior.mean

    @property
    def variance(self) -> Tensor:
        return self.posterior.variance

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.posterior.rsample(as_size("sample_shape", sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return ``log q - log p``, in nats; without a prior ``log q``."""
        if self.posterior._validate_args:
            shapes = self.batch_shape, self.event_shape
            check_value(value, "posterior", self.posterior.mean, *shapes)
        ratio = self.posterior.log_prob(value)
        return ratio if self.prior is None else ratio - self.prior.log_prob(value)

    def kl(self) -> Tensor:
        """Return the mean of :meth:`log_prob`: a KL, or minus an entropy without a prior."""
        with autocast_off(self.posterior.mean):
            if self.prior is None:
                return -self.posterior.entropy()
            return kl_divergence(self.posterior, self.prior)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Auxiliary":
        batch_shape = as_expanded(batch_shape, self.batch_shape)
        prior = None if self.prior is None else self.prior.expand(batch_shape)
        return Auxiliary(self.posterior.expand(batch_shape), prior)


@singledispatch
def quantiles(distribution: Any, probs: Tensor) -> Tensor:
    """Return marginal quantiles ``(num, *batch_shape, *event_shape)`` of each element of a posterior.

    Quantiles under elementwise bijections are transformed. On a support without one, such as a simplex,
    mean field has the images of unconstrained quantiles. Quantiles of K equally likely points are
    interpolated, as by :func:`torch.quantile`. Other distributions have ``icdf``, or
    raise a ``NotImplementedError``, as a flow does. Probabilities of a posterior in single precision may
    have double precision, and so may the result.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.tensor([0.0, 10.0]), torch.tensor([1.0, 2.0]))
        >>> quantiles(q, torch.tensor([0.5, 0.975])).round(decimals=2)
        tensor([[ 0.0000, 10.0000],
                [ 1.9600, 13.9200]])
    """
    return distribution.icdf(in_front(probs, distribution.mean))


@quantiles.register(Independent)
def _(distribution: Any, probs: Tensor) -> Tensor:
    return quantiles(distribution.base_dist, probs)


@quantiles.register(PointMass)
@quantiles.register(GaussianWeight)
def _(distribution: Any, probs: Tensor) -> Tensor:
    return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)


@quantiles.register
def _(distribution: TransformedDistribution, probs: Tensor) -> Tensor:
    """Transform quantiles by elementwise bijections, which may be decreasing."""
    for transform in distribution.transforms:
        if not isinstance(transform, ReshapeTransform):
            _ = transform.sign  # a NotImplementedError if elements are mixed, as in a flow
    ends = torch.stack([image_of_quantiles(distribution, each) for each in (probs, 1 - probs)])
    return torch.where(in_front(probs, ends[0, 0]) < 0.5, ends.amin(0), ends.amax(0))


def image_of_quantiles(distribution: TransformedDistribution, probs: Tensor) -> Tensor:
    """Return the images of the quantiles of the base of a transformed distribution."""
    values = quantiles(distribution.base_dist, probs)
    for transform in distribution.transforms:
        values = transform(values)
    return values


def normal_quantiles(mean: Tensor, stddev: Tensor, probs: Tensor) -> Tensor:
    """Return quantiles of normals, ``(num, *shape)``; a scale may be zero."""
    at = ndtri(in_front(probs, mean))
    return torch.where(stddev > 0, mean + stddev * at, mean)


def in_front(probs: Tensor, like: Tensor) -> Tensor:
    """Return probabilities ``(num, 1, ...)`` that broadcast to a tensor."""
    return probs.reshape(-1, *(1 for _ in range(like.dim())))


# ---- KL divergences -------------------------------------------------------------------------------


def expected_neg_log_prob(mean: Tensor, variance: Tensor, prior: Any) -> Tensor:
    r"""Return :math:`E[-\log p(w)]` of each element of a normal, for normal and Laplace priors, in nats.

    For a Laplace prior with location m it uses, with :math:`d = \mu - m`,

    .. math:: E|w - m| = \sigma \sqrt{2 / \pi}\, e^{-d^2 / 2 \sigma^2}
        + d\, \mathrm{erf}\left( \frac{d}{\sigma \sqrt 2} \right)

    Gradients are finite also at zero variance. Other priors define ``expected_neg_log_prob``, or
    raise a ``NotImplementedError``.
    """
    prior = base_of(prior)
    if hasattr(prior, "expected_neg_log_prob"):
        return prior.expected_neg_log_prob(mean, variance)
    if isinstance(prior, Normal):
        return variance / (2 * prior.scale.square()) - prior.log_prob(mean)
    if isinstance(prior, Laplace):
        distance = _mean_distance(mean - prior.loc, variance)
        return (2 * prior.scale).log() + distance / prior.scale
    raise NotImplementedError


def _mean_distance(difference: Tensor, variance: Tensor) -> Tensor:
    """Return ``E|x|`` for a normal x with this mean and variance."""
    scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    # A wider normal is as accurate where the mean is far out, and keeps quotients small.
    scale = torch.maximum(scale, difference.detach().abs() / _FAR)
    ratio = difference / scale
    spread = math.sqrt(2 / math.pi) * scale * torch.exp(-0.5 * ratio.square())
    return spread + difference * torch.erf(ratio / math.sqrt(2))


class JoinedPrior(Distribution):
    """Independent priors of a weight ``(out, *rest)`` and a bias ``(out,)``, over ``(out, in + 1)``.

    The KL has a closed form if both are independent normals or independent Laplace distributions.

    Example:
        >>> from pyro.distributions import Normal
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> weight = Normal(torch.zeros(2, 3), 1.0).to_event(2)
        >>> prior = JoinedPrior(weight, Normal(torch.zeros(2), 1.0).to_event(1))
        >>> torch.distributions.kl_divergence(MeanFieldNormal(torch.zeros(2, 4), 1.0), prior)
        tensor(0.)
    """

    @checked
    def __init__(self, weight: Distribution, bias: Distribution) -> None:
        self.weight: Any = weight
        self.bias: Any = bias
        self.weight_shape = weight.batch_shape + weight.event_shape
        joined = torch.Size([self.weight_shape[0], self.weight_shape[1:].numel() + 1])
        super().__init__(torch.Size(), joined, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``(out, in + 1)``, in nats."""
        if self.weight._validate_args:
            check_value(
                value, "weight", example_of(self.weight), self.batch_shape, self.event_shape
            )
            check_shape("value", value, self.event_shape, "(out, in + 1)")
        weight, bias = value[..., :-1].reshape(self.weight_shape), value[..., -1]
        return self.weight.log_prob(weight).sum() + self.bias.log_prob(bias).sum()

    def expected_neg_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return :func:`expected_neg_log_prob` of weight and bias, ``(*batch, out, in + 1)``."""
        shape = (*mean.shape[:-2], *self.weight_shape)
        first, second = (moment[..., :-1].reshape(shape) for moment in (mean, variance))
        weight = expected_neg_log_prob(first, second, self.weight).reshape(mean[..., :-1].shape)
        bias = expected_neg_log_prob(mean[..., -1], variance[..., -1], self.bias)
        return torch.cat([weight, bias.unsqueeze(-1)], -1)

    def as_normal(self) -> Normal | None:
        """Return independent normals over ``(out, in + 1)``, or None if a prior is not normal."""
        weight, bias = _without_wrappers(self.weight), _without_wrappers(self.bias)
        if not (isinstance(weight, Normal) and isinstance(bias, Normal)):
            return None
        loc = self._join(weight.loc, bias.loc)
        return Normal(loc, self._join(weight.scale, bias.scale), validate_args=False)

    def _join(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return ``(out, in + 1)``, or ``(1, in + 1)`` if both are constant."""
        shape = self.weight_shape
        weight = shrink(weight.expand(shape), len(shape))
        bias = shrink(bias.expand(shape[:1]), 1)
        rows = 1 if weight.numel() == bias.numel() == 1 else shape[0]
        full = weight.expand(rows, *shape[1:]).flatten(1)
        return torch.cat([full, bias.expand(rows).unsqueeze(-1)], -1)


def _without_wrappers(prior: Any) -> Any:
    """Return the base of a prior, as plain normals if it is a weight of independent elements."""
    base = base_of(prior)
    if isinstance(base, IndependentWeight):
        return Normal(base.loc, base.stddev, validate_args=False)
    return base


@register_kl(GaussianWeight, Normal)
def _kl_weight_normal(q: GaussianWeight, p: Any) -> Tensor:
    r"""KL from any Gaussian to independent normals, in nats, ``(*batch_shape,)``.

    .. math:: \tfrac12 \sum_i \left[ \frac{\Sigma_{ii} + (\mu_i - m_i)^2}{s_i^2} - 1
        + \log s_i^2 \right] - \tfrac12 \log\det\Sigma
    """
    moment, log_det = _squares_and_logs(q, p)
    return 0.5 * (moment + log_det - q.log_det_covariance - q.event_shape.numel())


def normal_cross_entropy(q: Any, p: Any) -> Tensor:
    """Return ``E[-log p(w)]`` for independent normals p, in nats, ``(*batch_shape,)``."""
    moment, log_det = _squares_and_logs(q, p)
    return 0.5 * (moment + log_det + q.event_shape.numel() * math.log(2 * math.pi))


def _squares_and_logs(q: Any, p: Any) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\sum_i (\Sigma_{ii} + (\mu_i - m_i)^2) / s_i^2` and :math:`\sum_i \log s_i^2`."""
    q, event_dim, size = in_batch_of(q, p.loc), len(q.event_shape), q.event_shape.numel()
    loc = shrink(p.loc.expand(q.mean.shape), event_dim)
    scale = shrink(p.scale.expand(q.mean.shape), event_dim)
    count = scale.shape[scale.dim() - event_dim :].numel()
    if count == 1:
        scale = scale.reshape(q.batch_shape)
        # Of the weight's size, this loss keeps its inputs only.
        squares = F.mse_loss(q.mean, loc.expand_as(q.mean), reduction="none")
        distance = event_sum(squares, event_dim)
        return (q.variance_sum + distance) / scale.square(), 2 * size * scale.log()
    moment = event_sum((q.variance + (q.mean - loc).square()) / scale.square(), event_dim)
    return moment, 2 * size / count * event_sum(scale.log(), event_dim)


def in_batch_of(q: Any, loc: Tensor) -> Any:
    """Return a distribution expanded to the batch of independent normals over its events."""
    batch = loc.shape[: max(0, loc.dim() - len(q.event_shape))]
    if not batch or batch == q.batch_shape:
        return q
    batch = torch.broadcast_shapes(q.batch_shape, batch)
    return q if batch == q.batch_shape else q.expand(batch)


@register_kl(GaussianWeight, Laplace)
def kl_from_moments(q: GaussianWeight, p: Any) -> Tensor:
    """KL to priors of :func:`expected_neg_log_prob`, in nats, ``(*batch_shape,)``."""
    return q._event_sum(expected_neg_log_prob(q.mean, q.variance, p)) - q.entropy()


@register_kl(WeightDistribution, Independent)
def _kl_weight_independent(q: WeightDistribution, p: Any) -> Tensor:
    _check_events(q, p)
    return kl_divergence(q, base_of(p))


@register_kl(GaussianWeight, IndependentWeight)  # more specific than the KL between Gaussians
@register_kl(WeightDistribution, IndependentWeight)
def kl_to_independent(q: Any, p: Any) -> Tensor:
    """KL to a prior that is a weight distribution with independent elements."""
    q, p = in_one_batch(q, p)
    return kl_divergence(q, _without_wrappers(p))


def in_one_batch(q: Any, p: Any) -> Iterator[Any]:
    """Return distributions over weights of one shape with their batches expanded to one."""
    _check_events(q, p)
    batch = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    return (each if each.batch_shape == batch else each.expand(batch) for each in (q, p))


def _check_events(q: Any, p: Any) -> None:
    """Raise a ``ValueError`` unless two distributions are over weights of one shape."""
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"The posterior and the prior must be over weights of one shape, but got "
            f"{tuple(q.event_shape)} and {tuple(p.event_shape)}. Reshape the prior's arguments."
        )


@register_kl(WeightDistribution, JoinedPrior)
def _kl_weight_joined(q: WeightDistribution, p: JoinedPrior) -> Tensor:
    """KL to separate priors of a weight and its bias, if there is one to normals."""
    normal = p.as_normal()
    if normal is None and not isinstance(q, GaussianWeight):
        raise NotImplementedError
    return kl_from_moments(q, p) if normal is None else kl_divergence(q, normal)
