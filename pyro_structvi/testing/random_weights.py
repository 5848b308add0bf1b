"""Distributions over a weight with random arguments."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_structvi.structures.full_covariance import FullNormal
from pyro_structvi.structures.k_tied import KTiedNormal
from pyro_structvi.structures.low_rank import LowRankNormal
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.mean_field import LogScaleNormal, MeanFieldNormal
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.weights.weight_distribution import WeightDistribution

Shape = tuple[int, ...]
Make = Callable[[Shape, Shape, torch.dtype], WeightDistribution]
Argument = Callable[[Shape, int, int, torch.dtype], Tensor]


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return positive numbers around 1/2."""
    return torch.exp(0.3 * torch.randn(shape, dtype=dtype) - 0.7)


def cholesky_factor(batch_shape: Shape, size: int, dtype: torch.dtype) -> Tensor:
    """Return lower triangular matrices ``(*batch_shape, size, size)`` with positive diagonals."""
    below = torch.randn(*batch_shape, size, size, dtype=dtype).tril(-1) / size**0.5
    factor: Tensor = below + torch.diag_embed(positive(*batch_shape, size, dtype=dtype))
    return factor


def random_weight(distribution: Callable[..., WeightDistribution], *arguments: Argument) -> Make:
    """Return a function ``make(batch_shape, event_shape, dtype)`` of a :class:`Structure`.

    Args:
        distribution: The class, with a mean as its first argument.
        arguments: Its further arguments, functions of ``batch_shape, out, in, dtype``.
    """

    def make(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> WeightDistribution:
        out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
        loc = torch.randn(*batch_shape, *event_shape, dtype=dtype)
        others = [argument(batch_shape, out, size, dtype) for argument in arguments]
        return distribution(loc, *others)

    return make


def make_mean_field(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> MeanFieldNormal:
    """Return independent normals."""
    shape = (*batch_shape, *event_shape)
    loc = torch.randn(shape, dtype=dtype)
    return MeanFieldNormal(loc, positive(*shape, dtype=dtype), event_dim=len(event_shape))


def make_log_scale(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> LogScaleNormal:
    """Return independent normals given by the logarithms of their scales."""
    q = make_mean_field(batch_shape, event_shape, dtype)
    return LogScaleNormal(q.loc, q.scale.log(), len(event_shape))


def make_k_tied(rank: int) -> Make:
    """Return what makes k-tied normals of a rank."""
    return random_weight(
        KTiedNormal,
        lambda batch, out, size, dtype: positive(*batch, out, rank, dtype=dtype),
        lambda batch, out, size, dtype: positive(*batch, size, rank, dtype=dtype),
    )


def make_low_rank(rank: int, isotropic: bool = False) -> Make:
    """Return what makes low-rank normals."""

    def make(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> LowRankNormal:
        shape = (*batch_shape, *event_shape)
        diagonal = (*batch_shape, *(1 for _ in event_shape)) if isotropic else shape
        return LowRankNormal(
            torch.randn(shape, dtype=dtype),
            torch.randn(*batch_shape, rank, *event_shape, dtype=dtype),
            positive(*diagonal, dtype=dtype),
            alpha=0.8,
            event_dim=len(event_shape),
        )

    return make


make_full = random_weight(
    FullNormal, lambda batch, out, size, dtype: cholesky_factor(batch, out * size, dtype)
)
make_matrix_normal = random_weight(
    MatrixNormal,
    lambda batch, out, size, dtype: cholesky_factor(batch, out, dtype),
    lambda batch, out, size, dtype: cholesky_factor(batch, size, dtype),
)
make_rowwise = random_weight(
    RowwiseNormal, lambda batch, out, size, dtype: cholesky_factor((*batch, out), size, dtype)
)
