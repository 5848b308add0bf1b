"""The KL from any Gaussian over a weight to independent normals, written once."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Independent, Normal, register_kl
from torch.distributions.kl import kl_divergence

from pyro_structvi.distributions.mean_field import MeanFieldNormal
from pyro_structvi.distributions.weight_distribution import WeightDistribution, event_sum


def has_one_scale(prior: Any, shape: torch.Size, event_dim: int) -> bool:
    """Whether normals have one and the same standard deviation in memory for every entry."""
    return _one_number(prior.scale.expand(shape), event_dim) is not None


def prior_terms(prior: Any, mean: Tensor, spread: Tensor, event_dim: int) -> Tensor:
    r"""Return :math:`\sum_i [(\Sigma_{ii} + (\mu_i - m_i)^2) / s_i^2 - 1 + \log s_i^2]`.

    Args:
        prior: Independent normals ``N(m_i, s_i^2)``, broadcastable to ``mean``.
        mean: The means of a Gaussian, ``(*batch, *event)``.
        spread: Its variances, or, where the prior has one scale, their sum ``(*batch,)``.
        event_dim: How many dimensions to sum over.

    Returns:
        What a KL has for its prior, ``(*batch,)``.
    """
    loc, scale = prior.loc.expand(mean.shape), prior.scale.expand(mean.shape)
    size = mean.shape[mean.dim() - event_dim :].numel()
    one_scale = _one_number(scale, event_dim)
    if one_scale is not None:
        one_scale = one_scale.reshape(mean.shape[: mean.dim() - event_dim])
        one_loc = _one_number(loc, event_dim)
        distance = _SquaredDistance.apply(mean, loc if one_loc is None else one_loc, event_dim)
        moment = (spread + distance) / one_scale.square()
        log_det_prior = 2 * size * one_scale.log()
    else:
        moment = event_sum((spread + (mean - loc).square()) / scale.square(), event_dim)
        log_det_prior = 2 * event_sum(scale.log(), event_dim)
    terms: Tensor = moment + log_det_prior - size
    return terms


def _one_number(tensor: Tensor, event_dim: int) -> Tensor | None:
    """Return the one number in memory that an event repeats, ``(*batch, 1, ...)``, or None."""
    event = range(-event_dim, 0)
    if all(tensor.shape[dim] == 1 or tensor.stride(dim) == 0 for dim in event):
        index: Any = (..., *(slice(0, 1) for _ in event))
        return tensor[index]
    return None


class _SquaredDistance(torch.autograd.Function):
    """``|mean - loc|^2`` over an event, with a gradient of one pass over the mean."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
        """Sum the squares; torch's norm would lose digits in single precision."""
        return event_sum((mean - loc).square_(), event_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        """Keep the points."""
        mean, loc, ctx.event_dim = inputs
        ctx.save_for_backward(mean, loc)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return ``2 (mean - loc)``, and what is its opposite for ``loc``."""
        mean, loc = ctx.saved_tensors
        twice = 2 * gradient.reshape(*gradient.shape, *(1 for _ in range(ctx.event_dim)))
        of_mean = torch.addcmul(-twice * loc, mean, twice)
        of_loc = -of_mean.sum_to_size(loc.shape) if ctx.needs_input_grad[1] else None
        return of_mean, of_loc, None


@register_kl(WeightDistribution, Normal)
def _kl_weight_normal(q: WeightDistribution, p: Any) -> Tensor:
    r"""KL from any Gaussian to independent normals, in nats, ``(*batch_shape,)``.

    .. math:: \tfrac12 \sum_i \left[ \frac{\Sigma_{ii} + (\mu_i - m_i)^2}{s_i^2} - 1
        + \log s_i^2 \right] - \tfrac12 \log\det\Sigma

    so that a structure supplies ``mean``, ``variance`` and ``log_det_covariance`` only.
    """
    event_dim = len(q.event_shape)
    if has_one_scale(p, q.mean.shape, event_dim):
        spread, log_det = q.trace_and_log_det()
    else:
        spread, log_det = q.variance, q.log_det_covariance
    return 0.5 * (prior_terms(p, q.mean, spread, event_dim) - log_det)


@register_kl(WeightDistribution, Independent)
def _kl_weight_independent(q: WeightDistribution, p: Any) -> Tensor:
    """Unwrap ``Independent``; whatever is inside then finds its own rule, or none."""
    return kl_divergence(q, p.base_dist)


@register_kl(WeightDistribution, MeanFieldNormal)
def _kl_weight_mean_field(q: WeightDistribution, p: MeanFieldNormal) -> Tensor:
    """A mean-field distribution in the place of the prior is a set of independent normals."""
    return kl_divergence(q, Normal(p.loc, p.scale, validate_args=False))
