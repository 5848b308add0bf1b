"""The registry: one entry makes a structure known to tests, demo, benchmarks and parameter tables."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.dropout import MCDropoutGuide
from pyro_structvi.structures.full_covariance import FullCovarianceGuide
from pyro_structvi.structures.global_inducing.guide import GlobalInducingGuide
from pyro_structvi.structures.k_tied import KTiedGuide
from pyro_structvi.structures.low_rank import AutoLowRankLRT
from pyro_structvi.structures.matrix_normal import MatrixNormalGuide
from pyro_structvi.structures.mean_field import MeanFieldGuide
from pyro_structvi.structures.mixture import EnsembleGuide
from pyro_structvi.structures.point_estimate import MAPGuide
from pyro_structvi.structures.rowwise import RowwiseGuide
from pyro_structvi.testing.entry import (
    BENCHMARKS,
    CONVOLUTION,
    DEMO,
    EVERYWHERE,
    MATRIX,
    TESTS,
    VECTOR,
    GuideVariant,
    Place,
    Structure,
    full_covariance,
    k_tied_covariance,
    low_rank_covariance,
    make_full,
    make_k_tied,
    make_log_scale,
    make_low_rank,
    make_matrix_normal,
    make_mean_field,
    make_rowwise,
    matrix_normal_covariance,
    mean_field_covariance,
    rowwise_covariance,
    zero_covariance,
)
from pyro_structvi.testing.inducing import (
    inducing_guide,
    inducing_structure,
    make_conditional,
    make_inducing,
)


def triangle(size: int) -> int:
    """Return the number of elements of a triangular matrix."""
    return size * (size + 1) // 2


def variants(
    guide: Callable[..., StructuredGuide],
    num_parameters: Callable[..., int],
    *variants: tuple[str, tuple[Place, ...], dict[str, Any]],
) -> tuple[GuideVariant, ...]:
    """Return a guide under several names, each with places and options.

    The number of parameters is a function of ``out, in`` and the options.
    """
    return tuple(
        GuideVariant(name, guide, partial(num_parameters, **options), options, used_in)
        for name, used_in, options in variants
    )


def ensemble_parameters(m: int, n: int, size: int, **_: Any) -> int:
    """Return the number of elements of all members."""
    return size * m * n


K_TIED_GUIDES = variants(
    KTiedGuide,
    lambda m, n, rank=2, **_: m * n + rank * (m + n),
    ("k-tied", TESTS, {}),
    ("k-tied, joined", TESTS, {"join_bias": True}),
    ("k-tied, k = 1", DEMO + BENCHMARKS, {"rank": 1}),
    ("k-tied, k = 2", DEMO + BENCHMARKS, {"rank": 2}),
)

LOW_RANK_GUIDES = variants(
    AutoLowRankLRT,
    lambda m, n, rank, diagonal="full", **_: (rank + 1 + (diagonal == "full")) * m * n,
    ("low rank", TESTS, {"rank": 2, "diagonal": "constant"}),
    (
        "low rank and full diagonal, joined",
        TESTS,
        {"rank": 2, "join_bias": True},
    ),
    ("low rank, K = 1", BENCHMARKS, {"rank": 1, "diagonal": "constant"}),
    ("low rank, K = 2", BENCHMARKS, {"rank": 2, "diagonal": "constant"}),
    ("low rank, K = 5", BENCHMARKS, {"rank": 5, "diagonal": "constant"}),
    ("low rank, K = 5, joined", DEMO, {"rank": 5, "diagonal": "constant", "join_bias": True}),
    ("low rank, full diagonal", DEMO, {"rank": 5, "diagonal": "full", "join_bias": True}),
)

STRUCTURES: list[Structure] = [
    Structure(
        "mean field",
        make_mean_field,
        lambda q: mean_field_covariance(q.scale, len(q.event_shape)),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
        guides=variants(
            MeanFieldGuide,
            lambda m, n, **_: 2 * m * n,
            ("mean field, drawn", DEMO + BENCHMARKS, {"local_reparam": False}),
            ("mean field", EVERYWHERE, {}),
            ("mean field, flipout", BENCHMARKS, {"local_reparam": "flipout"}),
        ),
    ),
    Structure(
        "mean field by logarithms",
        make_log_scale,
        lambda q: mean_field_covariance(q.scale, len(q.event_shape)),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
    ),
    *(
        Structure(
            f"{rank}-tied",
            make_k_tied(rank),
            lambda q: k_tied_covariance(q.row_scale, q.column_scale),
            event_shapes=(VECTOR, MATRIX, CONVOLUTION),
            guides=K_TIED_GUIDES if rank == 2 else (),
        )
        for rank in (1, 2, 3)
    ),
    Structure(
        "matrix normal",
        make_matrix_normal,
        lambda q: matrix_normal_covariance(q.scale_tril_row, q.scale_tril_column),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
        serves_groups=False,
        guides=variants(
            MatrixNormalGuide,
            lambda m, n, **_: m * n + triangle(m) + triangle(n),
            ("matrix normal", TESTS + BENCHMARKS, {}),
            ("matrix normal, joined", TESTS + DEMO, {"join_bias": True}),
        ),
    ),
    Structure(
        "rowwise",
        make_rowwise,
        lambda q: rowwise_covariance(q.scale_tril),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
        guides=variants(
            RowwiseGuide,
            lambda m, n, **_: m * n + m * triangle(n),
            ("rowwise", TESTS + BENCHMARKS, {}),
            ("rowwise, joined", TESTS + DEMO, {"join_bias": True}),
        ),
    ),
    *(
        Structure(
            f"low rank {rank}{', isotropic' if isotropic else ''}",
            make_low_rank(rank, isotropic),
            lambda q: low_rank_covariance(q.factors, q.scale, 0.8, len(q.event_shape)),
            event_shapes=(VECTOR, MATRIX, CONVOLUTION),
            shared_covariance=lambda q: low_rank_covariance(
                q.factors, torch.zeros(()), 0.8, len(q.event_shape)
            ),
            guides=LOW_RANK_GUIDES if rank == 2 else (),
        )
        for rank, isotropic in ((1, True), (2, False), (3, True))
    ),
    inducing_structure(
        "given inducing weights",
        make_conditional,
        zero_covariance,
        kl_is_dense=True,
        guides=tuple(
            inducing_guide(
                name,
                used_in,
                shape,
                partial(ensemble_parameters, size=size),
                inducing_posterior="ensemble",
                ensemble_size=size,
            )
            for name, used_in, shape, size in (
                ("inducing weights, ensemble", TESTS, (3, 2), 3),
                ("Ensemble-U", DEMO, (16, 16), 5),
            )
        ),
    ),
    inducing_structure(
        "inducing weights, diagonal",
        make_inducing(make_mean_field, bias_scale=False),
        lambda q: mean_field_covariance(q.scale, 2),
        guides=(
            inducing_guide("inducing weights", TESTS, (3, 2)),
            inducing_guide("FFG-U", DEMO, (16, 16)),
            inducing_guide("FFG-U, 64 x 64", DEMO, (64, 64)),
            inducing_guide("inducing 64", BENCHMARKS, (64, 64)),
            inducing_guide("inducing 64, drawn", BENCHMARKS, (64, 64), local_reparam=False),
        ),
    ),
    inducing_structure(
        "inducing weights, diagonal, a bias",
        make_inducing(make_mean_field, bias_scale=True),
        lambda q: mean_field_covariance(q.scale, 2),
    ),
    inducing_structure(
        "inducing weights, matrix normal, a bias",
        make_inducing(make_matrix_normal, bias_scale=True),
        lambda q: matrix_normal_covariance(q.scale_tril_row, q.scale_tril_column),
    ),
    inducing_structure(
        "inducing weights, full",
        make_inducing(make_full, bias_scale=False),
        lambda q: full_covariance(q.scale_tril),
        guides=tuple(
            inducing_guide(
                name,
                used_in,
                shape,
                lambda m, n: m * n + triangle(m * n),
                inducing_posterior="full",
                join_bias=join_bias,
            )
            for name, used_in, shape, join_bias in (
                ("inducing weights, full, not joined", TESTS, (3, 2), False),
                ("FCG-U", DEMO, (16, 16), True),
            )
        ),
    ),
    Structure(
        "full",
        make_full,
        lambda q: full_covariance(q.scale_tril),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
        has_convolution_image=False,
        guides=variants(
            FullCovarianceGuide,
            lambda m, n, **_: m * n + triangle(m * n),
            ("full covariance", EVERYWHERE, {}),
        ),
    ),
]

# Guides whose layers depend on each other: no weight has a distribution by itself.
LAYERED: list[GuideVariant] = [
    *variants(
        GlobalInducingGuide,
        lambda m, n, points=100: points * (m + 1) + n,  # of a layer behind another one
        ("global inducing", DEMO + BENCHMARKS, {}),
    ),
]

# Guides of points: there is no density over weights.
POINTS: list[GuideVariant] = [
    *variants(MAPGuide, lambda m, n: m * n, ("points", TESTS, {}), ("MAP", DEMO + BENCHMARKS, {})),
    *variants(
        EnsembleGuide,
        ensemble_parameters,
        ("Ensemble-W", DEMO, {"size": 5}),
        ("ensemble of 5", BENCHMARKS, {"size": 5}),
        ("ensemble of 5, in turn", BENCHMARKS, {"size": 5, "vectorize": False}),
    ),
    *variants(
        MCDropoutGuide,
        lambda m, n, **_: m * n,
        ("dropout", TESTS, {"rate": 0.2}),
        ("MC dropout", BENCHMARKS, {}),
    ),
]


def guides_for(place: Place) -> dict[str, GuideVariant]:
    """Return the guides with a density over weights that are run in a place, by name."""
    guides = (guide for structure in STRUCTURES for guide in structure.guides)
    return {guide.name: guide for guide in guides if place in guide.used_in}


def layered_for(place: Place) -> dict[str, GuideVariant]:
    """Return the guides whose layers depend on each other that are run in a place, by name."""
    return {guide.name: guide for guide in LAYERED if place in guide.used_in}


def points_for(place: Place) -> dict[str, GuideVariant]:
    """Return the guides of points that are run in a place, by name."""
    return {guide.name: guide for guide in POINTS if place in guide.used_in}
