"""KL divergences of distributions over weights from independent priors."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, Independent, Laplace, Normal, register_kl
from torch.distributions.kl import kl_divergence

from pyro_structvi._checks import check_shape, checked
from pyro_structvi.linalg.matrices import event_sum, shrink
from pyro_structvi.weights.arguments import check_value
from pyro_structvi.weights.torch_distributions import base_of, example_of
from pyro_structvi.weights.weight_distribution import (
    GaussianWeight,
    IndependentWeight,
    WeightDistribution,
)

_FAR = 40.0  # standard deviations, at which a normal's density is zero in double precision


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
        own: Tensor = prior.expected_neg_log_prob(mean, variance)
        return own
    if isinstance(prior, Normal):
        nats: Tensor = variance / (2 * prior.scale.square()) - prior.log_prob(mean)
        return nats
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
        total: Tensor = self.weight.log_prob(weight).sum() + self.bias.log_prob(bias).sum()
        return total

    def expected_neg_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return :func:`expected_neg_log_prob` of weight and bias, ``(*batch, out, in + 1)``."""
        shape = (*mean.shape[:-2], *self.weight_shape)
        first, second = (moment[..., :-1].reshape(shape) for moment in (mean, variance))
        weight = expected_neg_log_prob(first, second, self.weight).reshape(mean[..., :-1].shape)
        bias = expected_neg_log_prob(mean[..., -1], variance[..., -1], self.bias)
        return torch.cat([weight, bias.unsqueeze(-1)], -1)

    def normals(self) -> tuple[Any, Any] | None:
        """Return both priors as plain normals, or None if one of them is not normal."""
        weight, bias = _base(self.weight), _base(self.bias)
        if not (isinstance(weight, Normal) and isinstance(bias, Normal)):
            return None
        return weight, bias


@register_kl(GaussianWeight, Normal)
def _kl_weight_normal(q: GaussianWeight, p: Any) -> Tensor:
    r"""KL from any Gaussian to independent normals, in nats, ``(*batch_shape,)``.

    .. math:: \tfrac12 \sum_i \left[ \frac{\Sigma_{ii} + (\mu_i - m_i)^2}{s_i^2} - 1
        + \log s_i^2 \right] - \tfrac12 \log\det\Sigma
    """
    moment, log_det = _squares_and_logs(q, p)
    size = q.event_shape.numel()
    divergence: Tensor = 0.5 * (moment + log_det - q.log_det_covariance - size)
    return divergence


def normal_cross_entropy(q: Any, p: Any) -> Tensor:
    """Return ``E[-log p(w)]`` for independent normals p, in nats, ``(*batch_shape,)``."""
    moment, log_det = _squares_and_logs(q, p)
    nats: Tensor = 0.5 * (moment + log_det + q.event_shape.numel() * math.log(2 * math.pi))
    return nats


def _squares_and_logs(q: Any, p: Any) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\sum_i (\Sigma_{ii} + (\mu_i - m_i)^2) / s_i^2` and :math:`\sum_i \log s_i^2`."""
    event_dim, size = len(q.event_shape), q.event_shape.numel()
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


@register_kl(GaussianWeight, Laplace)
def kl_from_moments(q: GaussianWeight, p: Any) -> Tensor:
    """KL to priors of :func:`expected_neg_log_prob`, in nats, ``(*batch_shape,)``."""
    return q._event_sum(expected_neg_log_prob(q.mean, q.variance, p)) - q.entropy()


@register_kl(WeightDistribution, Independent)
def _kl_weight_independent(q: WeightDistribution, p: Any) -> Tensor:
    """Apply the rule of the base distribution."""
    return kl_divergence(q, p.base_dist)


@register_kl(WeightDistribution, IndependentWeight)
def kl_weight_independent(q: WeightDistribution, p: IndependentWeight) -> Tensor:
    """KL to a prior that is a weight distribution with independent elements."""
    return kl_divergence(q, _plain(p))


@register_kl(GaussianWeight, JoinedPrior)
def kl_weight_joined(q: GaussianWeight, p: JoinedPrior) -> Tensor:
    """KL to separate priors of a weight and its bias."""
    normals = p.normals()
    if normals is None:
        divergence: Tensor = kl_from_moments(q, p)
        return divergence
    weight, bias = normals
    loc, scale = (
        _join(getattr(weight, name), getattr(bias, name), p.weight_shape)
        for name in ("loc", "scale")
    )
    return kl_divergence(q, Normal(loc, scale, validate_args=False))


def _base(prior: Any) -> Any:
    prior = base_of(prior)
    return _plain(prior) if isinstance(prior, IndependentWeight) else prior


def _plain(p: IndependentWeight) -> Normal:
    return Normal(p.loc, p.stddev, validate_args=False)


def _join(weight: Tensor, bias: Tensor, weight_shape: torch.Size) -> Tensor:
    """Return ``(out, in + 1)``, or ``(1, in + 1)`` if both are constant."""
    weight = shrink(weight.expand(weight_shape), len(weight_shape))
    bias = shrink(bias.expand(weight_shape[:1]), 1)
    rows = 1 if weight.numel() == bias.numel() == 1 else weight_shape[0]
    full = weight.expand(rows, *weight_shape[1:]).flatten(1)
    return torch.cat([full, bias.expand(rows).unsqueeze(-1)], -1)
