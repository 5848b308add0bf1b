"""The KL between two Gaussians over a weight, as for a prior that is an earlier posterior."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    LowRankMultivariateNormal,
    MultivariateNormal,
    TransformedDistribution,
    kl_divergence,
    register_kl,
)
from torch.distributions.transforms import ReshapeTransform

from pyro_structvi.linalg.matrices import event_sum, identity_like
from pyro_structvi.structures.full_covariance import FullNormal
from pyro_structvi.structures.low_rank import LowRankNormal
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.mean_field import PrunedNormal
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.weights.site_distributions import in_one_batch, kl_to_independent
from pyro_structvi.weights.torch_distributions import map_tensors
from pyro_structvi.weights.weight_distribution import (
    GaussianWeight,
    IndependentWeight,
    noise_columns,
)


@register_kl(GaussianWeight, GaussianWeight)
def kl_between(q: Any, p: Any) -> Tensor:
    r"""KL between two Gaussians over weights of one shape, in nats; batches broadcast.

    .. math:: \tfrac12 \left[ \operatorname{tr}(\Sigma_p^{-1} \Sigma_q)
        + (\mu_q - \mu_p)^\top \Sigma_p^{-1} (\mu_q - \mu_p) - D
        + \log\det\Sigma_p - \log\det\Sigma_q \right]

    Pairs without a rule for the trace whiten all columns of ``A_q`` by p, for small weights.
    """
    q, p = in_one_batch(q, p)
    rules = (rule for kinds, rule in _TRACES if all(map(isinstance, (q, p), kinds)))
    moment = next(rules, _trace_of_columns)(q, p) + p.mahalanobis(q.mean - p.mean)
    log_dets = p.log_det_covariance - q.log_det_covariance
    return 0.5 * (moment + log_dets - q.event_shape.numel())


register_kl(PrunedNormal, IndependentWeight)(kl_to_independent)


@register_kl(PrunedNormal, GaussianWeight)
def no_closed_form(q: Any, p: Any) -> Tensor:
    """Raise a ``NotImplementedError``, so that the KL is estimated from densities."""
    raise NotImplementedError


# ---- priors of torch ---------------------------------------------------------------------------------


@register_kl(GaussianWeight, LowRankMultivariateNormal)
@register_kl(GaussianWeight, MultivariateNormal)
def _kl_to_multivariate(q: GaussianWeight, p: Any) -> Tensor:
    """KL to a normal over all elements in row-major order, or over each row."""
    if len(q.event_shape) == 2 and p.loc.shape[-2:] == q.event_shape:
        return kl_divergence(q, RowwiseNormal(p.loc, p.scale_tril, validate_args=False))
    if p.event_shape.numel() != q.event_shape.numel():
        raise NotImplementedError
    loc, event_dim = p.loc.reshape(*p.batch_shape, *q.event_shape), len(q.event_shape)
    if isinstance(p, MultivariateNormal):
        return kl_divergence(q, FullNormal(loc, p.scale_tril, validate_args=False))
    factors = p.cov_factor.mT.reshape(*p.batch_shape, -1, *q.event_shape)
    scale = p.cov_diag.sqrt().reshape(loc.shape)
    return kl_divergence(q, LowRankNormal(loc, factors, scale, 1.0, event_dim, False))


@register_kl(GaussianWeight, TransformedDistribution)
def _kl_to_reshaped(q: GaussianWeight, p: Any) -> Tensor:
    is_reshaped = all(isinstance(transform, ReshapeTransform) for transform in p.transforms)
    is_normal = isinstance(p.base_dist, (MultivariateNormal, LowRankMultivariateNormal))
    if not (is_reshaped and is_normal and p.event_shape == q.event_shape):
        raise NotImplementedError
    return kl_divergence(q, p.base_dist)


# ---- traces of p's precision times q's covariance ----------------------------------------------------


def _trace_of_columns(q: GaussianWeight, p: GaussianWeight) -> Tensor:
    """Return the sum of squares of all columns of ``A_q``, whitened by p."""
    return p.mahalanobis(noise_columns(q)).sum(0)


def _trace_of_matrix_normals(q: MatrixNormal, p: MatrixNormal) -> Tensor:
    """Return the product of the traces for rows and for columns, in O(out^3 + in^3)."""
    rows = _whitened(p.scale_tril_row, q.scale_tril_row)
    columns = _whitened(p.scale_tril_column, q.scale_tril_column)
    return rows.square().sum((-2, -1)) * columns.square().sum((-2, -1))


def _trace_of_rows(q: RowwiseNormal, p: RowwiseNormal) -> Tensor:
    """Return the sum over rows, in O(out in^3)."""
    return _whitened(p.scale_tril, q.scale_tril).square().sum((-3, -2, -1))


def _trace_of_diagonal(q: IndependentWeight, p: Any) -> Tensor:
    return event_sum(q.variance * _precision_diagonal(p), len(q.event_shape))


def _trace_of_low_rank(q: LowRankNormal, p: Any) -> Tensor:
    """Return the sum over the diagonal part and K directions whitened by p."""
    event_dim = len(q.event_shape)
    trace = event_sum(q.scale.square() * _precision_diagonal(p), event_dim)
    trace += q.alpha * p.mahalanobis(q.factors.movedim(-event_dim - 1, 0)).sum(0)
    return trace


def _trace_by_woodbury(q: GaussianWeight, p: LowRankNormal) -> Tensor:
    """Return the trace for p's diagonal part minus the variances of q along p's K directions.

    Both terms cancel along the directions, and are in double precision.
    """
    dtype, event_dim = q.loc.dtype, len(q.event_shape)
    q, p = map_tensors(q, Tensor.double), map_tensors(p, Tensor.double)
    of_diagonal = event_sum(q.variance / p.scale.square(), event_dim)
    directions = p.precision_directions.movedim(-event_dim - 1, 0)
    noise = directions.new_zeros(len(directions), *q.batch_shape, *q.noise_shape)
    (scaled,) = torch.func.vjp(q.scale_noise, noise)[1](directions)
    of_directions = event_sum(scaled.square(), len(q.noise_shape)).sum(0)
    return (of_diagonal - of_directions).to(dtype)


def _precision_diagonal(p: MatrixNormal | RowwiseNormal | FullNormal) -> Tensor:
    """Return the diagonal of the inverse covariance, ``(*batch_shape, *event_shape)``."""
    if isinstance(p, MatrixNormal):
        rows, columns = map(_inverse_squares, (p.scale_tril_row, p.scale_tril_column))
        return p.as_weight(rows.unsqueeze(-1) * columns.unsqueeze(-2))
    return _inverse_squares(p.scale_tril).reshape(p.loc.shape)


def _inverse_squares(tril: Tensor) -> Tensor:
    """Return the diagonal of ``(L L')^-1``, the squared norms of the columns of ``L^-1``."""
    return _whitened(tril, identity_like(tril).expand_as(tril)).square().sum(-2)


def _whitened(tril: Tensor, columns: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(tril, columns, upper=False)


_BY_TRIANGLES = (MatrixNormal, RowwiseNormal, FullNormal)
_TRACES: list[tuple[tuple[Any, Any], Callable[[Any, Any], Tensor]]] = [
    ((MatrixNormal, MatrixNormal), _trace_of_matrix_normals),
    ((RowwiseNormal, RowwiseNormal), _trace_of_rows),
    ((GaussianWeight, LowRankNormal), _trace_by_woodbury),
    ((IndependentWeight, _BY_TRIANGLES), _trace_of_diagonal),
    ((LowRankNormal, _BY_TRIANGLES), _trace_of_low_rank),
]
