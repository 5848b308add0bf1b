"""The structures that go through the suite of ``test_contract.py``; a new one is added here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyro_structvi.distributions import FullNormal, KTiedNormal, LowRankNormal, MeanFieldNormal
from tests.dense_oracles import (
    full_covariance,
    k_tied_covariance,
    low_rank_covariance,
    mean_field_covariance,
)

VECTOR, MATRIX, CONVOLUTION = (4,), (4, 3), (4, 3, 2, 2)


def no_covariance(q):
    """Return zeros ``(D, D)``."""
    return torch.zeros(2 * (q.event_shape.numel(),))


@dataclass(frozen=True)
class Case:
    """A structure, as the suite sees it.

    Attributes:
        name: What its tests are called.
        make: A function of ``batch_shape, event_shape, dtype`` to a distribution with random
            arguments, all of them of that dtype.
        covariance: The dense covariance ``(*batch_shape, D, D)`` of row-major ``vec(W)``, from the
            distribution's arguments and by its definition.
        event_shapes: The shapes of weight it serves.
        shared_covariance: The part of the covariance whose noise all positions of an example share,
            ``(D, D)``; the rest of the noise is drawn independently at every position.
        has_convolution_image: Whether outputs of a convolution are drawn in the weight's place.
    """

    name: str
    make: Callable
    covariance: Callable
    event_shapes: tuple = (MATRIX, CONVOLUTION)
    shared_covariance: Callable = no_covariance
    has_convolution_image: bool = True


def positive(*shape, dtype):
    """Return positive numbers around 1/2."""
    return (0.3 * torch.randn(shape, dtype=dtype) - 0.7).exp()


def make_mean_field(batch_shape, event_shape, dtype):
    shape = (*batch_shape, *event_shape)
    loc = torch.randn(shape, dtype=dtype)
    return MeanFieldNormal(loc, positive(*shape, dtype=dtype), event_dim=len(event_shape))


def make_k_tied(rank):
    def make(batch_shape, event_shape, dtype):
        out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
        return KTiedNormal(
            torch.randn(*batch_shape, *event_shape, dtype=dtype),
            positive(*batch_shape, out, rank, dtype=dtype),
            positive(*batch_shape, size, rank, dtype=dtype),
        )

    return make


def make_low_rank(rank, isotropic=False):
    def make(batch_shape, event_shape, dtype):
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


def make_full(batch_shape, event_shape, dtype):
    size = torch.Size(event_shape).numel()
    below = torch.randn(*batch_shape, size, size, dtype=dtype).tril(-1) / size**0.5
    diagonal = positive(*batch_shape, size, dtype=dtype)
    loc = torch.randn(*batch_shape, *event_shape, dtype=dtype)
    return FullNormal(loc, below + torch.diag_embed(diagonal))


CASES = [
    Case(
        "mean field",
        make_mean_field,
        lambda q: mean_field_covariance(q.scale, len(q.event_shape)),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
    ),
    *(
        Case(
            f"{rank}-tied",
            make_k_tied(rank),
            lambda q: k_tied_covariance(q.row_scale, q.column_scale),
        )
        for rank in (1, 2, 3)
    ),
    *(
        Case(
            f"low rank {rank}{', isotropic' if isotropic else ''}",
            make_low_rank(rank, isotropic),
            lambda q: low_rank_covariance(q.factors, q.scale, 0.8, len(q.event_shape)),
            event_shapes=(VECTOR, MATRIX, CONVOLUTION),
            shared_covariance=lambda q: low_rank_covariance(
                q.factors, torch.zeros(()), 0.8, len(q.event_shape)
            ),
        )
        for rank, isotropic in ((1, True), (2, False), (3, True))
    ),
    Case(
        "full",
        make_full,
        lambda q: full_covariance(q.scale_tril),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
        has_convolution_image=False,
    ),
]

CONVOLUTION_CASES = [case for case in CASES if case.has_convolution_image]
