"""The divergence of a weight and its inducing weights from independent priors of the weight."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Laplace, Normal, kl_divergence, register_kl

from pyro_structvi.linalg.known_numbers import known_number
from pyro_structvi.linalg.matrices import event_sum, shrink
from pyro_structvi.structures.ensemble import PointMixture
from pyro_structvi.structures.inducing.augmented import AugmentedNormal
from pyro_structvi.structures.inducing.normal import InducingNormal
from pyro_structvi.structures.kl_between import kl_to_independent, no_closed_form
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.weights.kl import (
    JoinedPrior,
    expected_neg_log_prob,
    kl_weight_joined,
)
from pyro_structvi.weights.weight_distribution import (
    GaussianWeight,
    IndependentWeight,
    WeightDistribution,
)

register_kl(AugmentedNormal, IndependentWeight)(kl_to_independent)
for pair in (
    (AugmentedNormal, GaussianWeight),
    (GaussianWeight, AugmentedNormal),
    (AugmentedNormal,) * 2,
):
    register_kl(*pair)(
        no_closed_form
    )  # their densities are of the weight alone, and may be mixtures


@register_kl(InducingNormal, Normal)
def _kl_to_normals(q: InducingNormal, p: Any) -> Tensor:
    """KL over the weight and its inducing weights, in nats, ``(*batch_shape,)``."""
    loc, scale = (_rows_and_columns(q, value) for value in (p.loc, p.scale))
    own = q.joint.column_scale
    (out, size), matrix = q.joint.matrix_shape, (*q.batch_shape, *q.joint.matrix_shape)
    if loc.shape[-2:] == scale.shape[-2:] == own.shape[-2:] == (1, 1):  # one prior for all
        if _is_own(loc, scale, q.joint.scale):
            return _kl(q)
        columns = q.joint.columns
        group = columns.basis.sum(-1), columns.gram, size
        return _kl(q, _gap_of_columns(q, group, loc[..., 0, 0], scale[..., 0, 0], q.joint.scale))
    if scale.shape[-2] == loc.shape[-2] == 1:  # the same prior in every row
        first, second = (moment.unsqueeze(-2) for moment in _column_moments(q))
        gap = _gap(out, first, second, loc, scale, own)
    else:
        mean = q.mean.reshape(matrix)
        gap = _gap(1, mean, q.variance.reshape(matrix) + mean.square(), loc, scale, own)
    return _kl(q, gap.sum((-2, -1)))


@register_kl(InducingNormal, Laplace)
def _kl_from_moments(q: InducingNormal, p: Any) -> Tensor:
    """The same, to independent priors that are not all normal.

    Raises:
        NotImplementedError: If the mean log density of a prior is not known, for any normal or for this
            mixture of several.
    """
    if q.is_mixture:
        raise NotImplementedError
    mean, variance, joint = q.mean, q.variance, q.joint.weight_prior()
    own = Normal(joint.loc, joint.scale, validate_args=False)
    of_prior, of_own = (expected_neg_log_prob(mean, variance, prior) for prior in (p, own))
    return _kl(q, event_sum(of_prior - of_own, len(q.event_shape)))


@register_kl(InducingNormal, JoinedPrior)
def _kl_to_joined_priors(q: InducingNormal, p: JoinedPrior) -> Tensor:
    """The same, to priors of a weight and its bias, of one number each in the usual case."""
    divergence: Tensor
    if p.normals() is None:
        divergence = _kl_from_moments(q, p)
        return divergence
    scalars = p.scalars()
    if scalars is None or q.batch_shape:
        divergence = kl_weight_joined(q, p)
        return divergence
    joint = q.joint
    own = joint.scale if joint.bias_scale is None else joint.bias_scale
    if _is_own(*scalars[0], joint.scale) and _is_own(*scalars[1], own):
        return _kl(q)
    columns = joint.columns
    last = columns.basis[:, -1]
    outer = torch.outer(last, last)
    weight = columns.basis.sum(-1) - last, columns.gram - outer, joint.matrix_shape[1] - 1
    return _kl(
        q,
        _gap_of_columns(q, weight, *scalars[0], joint.scale)
        + _gap_of_columns(q, (last, outer, 1), *scalars[1], own),
    )


def _is_own(loc: Tensor, scale: Tensor, own: Tensor) -> bool:
    """Whether a normal prior is known to be the joint's own, so that there is no gap between them."""
    number = known_number(scale)
    return number is not None and known_number(loc) == 0.0 and known_number(own) == number


def _kl(q: InducingNormal, gap: Tensor | float = 0.0) -> Tensor:
    """Return the KL given the mean under q of ``log p_joint(W) - log p(W)``."""
    scale = q.conditional_scale
    conditional = q.event_shape.numel() * (scale.square() / 2 - scale.log() - 0.5)
    divergence: Tensor = conditional + gap
    if isinstance(q.inducing, PointMixture):
        return divergence
    standard = Normal(scale.new_zeros(()), scale.new_ones(()), validate_args=False)
    of_inducing: Tensor = kl_divergence(q.inducing, standard)
    return divergence + of_inducing


def _gap_of_columns(
    q: InducingNormal,
    group: tuple[Tensor, Tensor, int],
    loc: Tensor,
    scale: Tensor,
    own: Tensor,
) -> Tensor:
    """Return the gap of columns with one prior, from the sum, the Gram matrix and the number of them."""
    total, outer, count = group
    rows, gram, out = q.joint.rows.basis, q.joint.rows.gram, q.event_shape[0]
    first = (rows.sum(-1).unsqueeze(-2) @ q.inducing.mean @ total.unsqueeze(-1))[..., 0, 0]
    seen = (_second_moment(q.inducing, gram) * outer).sum((-2, -1))
    noise = out * count - _trace(gram) * _trace(outer)
    second = seen + q.conditional_scale.square() * noise
    return _gap(out * count, own * first, own.square() * second, loc, scale, own)


def _gap(
    count: int, first: Tensor, second: Tensor, loc: Tensor, scale: Tensor, own: Tensor
) -> Tensor:
    """Return the mean of ``log p_joint - log p`` over so many weights, from their moments.

    Zero where the two priors are one.
    """
    precision = scale.square().reciprocal()
    gap: Tensor = (
        second * (precision - own.square().reciprocal())
        + (count * loc - 2 * first) * loc * precision
        + 2 * count * (scale.log() - own.log())
    )
    return 0.5 * gap


def _rows_and_columns(q: InducingNormal, value: Tensor) -> Tensor:
    """View a prior's argument as ``(*batch, 1 or out, 1 or in)``."""
    event_dim = len(q.event_shape)
    value = shrink(value.expand(*q.batch_shape, *q.event_shape), event_dim)
    rows, *rest = value.shape[value.dim() - event_dim :]
    if any(size > 1 for size in rest):
        value = value.expand(*q.batch_shape, rows, *q.event_shape[1:])
    return value.reshape(*q.batch_shape, rows, -1)


def _column_moments(q: InducingNormal) -> tuple[Tensor, Tensor]:
    """Return the sums over rows of ``E[W]`` and of ``E[W^2]``, ``(*batch, in)`` each."""
    rows, columns, gram = q.joint.rows.basis, q.joint.columns.basis, q.joint.rows.gram
    scale, squared = q.joint.column_scale.squeeze(-2), q.conditional_scale.square().unsqueeze(-1)
    first = (rows.sum(-1).unsqueeze(-2) @ q.inducing.mean @ columns).squeeze(-2)
    seen = (columns * (_second_moment(q.inducing, gram) @ columns)).sum(-2)
    kept = q.event_shape[0] - _trace(gram).unsqueeze(-1) * columns.square().sum(-2)
    return scale * first, scale.square() * (seen + squared * kept)


def _second_moment(inducing: WeightDistribution, gram: Tensor) -> Tensor:
    """Return ``E[U' G U]`` for the inducing weights U, ``(*batch, M_in, M_in)``."""
    return inducing.mean.mT @ gram @ inducing.mean + _spread(inducing, gram)


def _spread(inducing: WeightDistribution, gram: Tensor) -> Tensor:
    """Return ``E[D' G D]`` for the deviation D of the inducing weights from their mean."""
    if isinstance(inducing, IndependentWeight):
        diagonal = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return torch.diag_embed((diagonal @ inducing.variance).squeeze(-2))
    if isinstance(inducing, MatrixNormal):
        rows, columns = inducing.scale_tril_row, inducing.scale_tril_column
        return _trace(rows.mT @ gram @ rows)[..., None, None] * (columns @ columns.mT)
    shape = inducing.event_shape
    covariance = inducing.covariance_matrix.unflatten(-1, shape).unflatten(-3, shape)
    return torch.einsum("...abcd,...ac->...bd", covariance, gram)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
