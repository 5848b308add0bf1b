"""The registry of guides for tests, demo and benchmarks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.dropout import MCDropoutGuide
from pyro_structvi.structures.eigenbasis import EigenbasisGuide
from pyro_structvi.structures.full_covariance import FullCovarianceGuide
from pyro_structvi.structures.global_inducing.guide import GlobalInducingGuide
from pyro_structvi.structures.inducing.family import InducingWeightGuide
from pyro_structvi.structures.k_tied import KTiedGuide
from pyro_structvi.structures.low_rank import AutoLowRankLRT
from pyro_structvi.structures.matrix_normal import MatrixNormalGuide
from pyro_structvi.structures.mean_field import MeanFieldGuide
from pyro_structvi.structures.mixture import EnsembleGuide, MixtureGuide
from pyro_structvi.structures.point_estimate import MAPGuide
from pyro_structvi.structures.rowwise import RowwiseGuide

Place = Literal["tests", "demo", "benchmarks"]

TESTS: tuple[Place, ...] = ("tests",)
DEMO: tuple[Place, ...] = ("demo",)
BENCHMARKS: tuple[Place, ...] = ("benchmarks",)
EVERYWHERE = TESTS + DEMO + BENCHMARKS


@dataclass(frozen=True)
class GuideVariant:
    """A guide with its options; a call with a model, and further options, makes the guide.

    Args:
        name: The name of the guide in tests and tables.
        guide: The class of the guide.
        options: Its options.
        used_in: The places that run it.
    """

    name: str
    guide: Callable[..., StructuredGuide]
    options: Mapping[str, Any] = field(default_factory=dict)
    used_in: tuple[Place, ...] = EVERYWHERE

    def __call__(self, model: Callable[..., Any], **options: Any) -> StructuredGuide:
        """Make the guide of a model."""
        return self.guide(model, **{**self.options, **options})


def variants(
    guide: Callable[..., StructuredGuide], *rows: tuple[str, tuple[Place, ...], dict[str, Any]]
) -> list[GuideVariant]:
    """Return a guide under several names, each with places and options."""
    return [GuideVariant(name, guide, options, used_in) for name, used_in, options in rows]


ENSEMBLE_U, FULL_U = {"inducing_posterior": "ensemble"}, {"inducing_posterior": "full"}
SMALL: dict[str, Any] = {"inducing_shape": (3, 2)}
APART = {"join_bias": False}  # biases

# Guides with a density over weights.
GUIDES: list[GuideVariant] = [
    *variants(
        MeanFieldGuide,
        ("mean field, drawn", DEMO + BENCHMARKS, {"local_reparam": False}),
        ("mean field", EVERYWHERE, {}),
        ("mean field, flipout", BENCHMARKS, {"local_reparam": "flipout"}),
    ),
    *variants(
        KTiedGuide,
        ("k-tied", TESTS, APART),
        ("k-tied, joined", TESTS, {"join_bias": True}),
        ("k-tied, k = 1", DEMO + BENCHMARKS, {"rank": 1, **APART}),
        ("k-tied, k = 2", DEMO + BENCHMARKS, {"rank": 2, **APART}),
    ),
    *variants(
        MatrixNormalGuide,
        ("matrix normal", TESTS + BENCHMARKS, APART),
        ("matrix normal, joined", TESTS + DEMO, {"join_bias": True}),
    ),
    *variants(
        EigenbasisGuide,
        ("eigenbasis", EVERYWHERE, {}),
        ("eigenbasis in blocks, not joined", TESTS, {"block_size": 2, **APART}),
    ),
    *variants(
        MixtureGuide,
        ("mixture of 5, k-tied", DEMO + BENCHMARKS, {"make_guide": KTiedGuide, "size": 5}),
    ),
    *variants(
        RowwiseGuide,
        ("rowwise", TESTS + BENCHMARKS, APART),
        ("rowwise, joined", TESTS + DEMO, {"join_bias": True}),
    ),
    *variants(
        AutoLowRankLRT,
        ("low rank", TESTS, {"rank": 2, "diagonal": "constant", **APART}),
        ("low rank and full diagonal, joined", TESTS, {"rank": 2, "join_bias": True}),
        ("low rank, K = 1", BENCHMARKS, {"rank": 1, "diagonal": "constant", **APART}),
        ("low rank, K = 2", BENCHMARKS, {"rank": 2, "diagonal": "constant", **APART}),
        ("low rank, K = 5", BENCHMARKS, {"rank": 5, "diagonal": "constant", **APART}),
        ("low rank, K = 5, joined", DEMO, {"rank": 5, "diagonal": "constant", "join_bias": True}),
        ("low rank, full diagonal", DEMO, {"rank": 5, "diagonal": "full", "join_bias": True}),
    ),
    *variants(
        InducingWeightGuide,
        ("inducing weights, ensemble", TESTS, {**SMALL, **ENSEMBLE_U, "ensemble_size": 3}),
        ("Ensemble-U", DEMO, {"inducing_shape": (16, 16), **ENSEMBLE_U, "ensemble_size": 5}),
        ("inducing weights", TESTS, SMALL),
        ("FFG-U", DEMO, {"inducing_shape": (16, 16)}),
        ("FFG-U, 64 x 64", DEMO, {"inducing_shape": (64, 64)}),
        ("inducing 64", BENCHMARKS, {"inducing_shape": (64, 64)}),
        ("inducing 64, drawn", BENCHMARKS, {"inducing_shape": (64, 64), "local_reparam": False}),
        ("inducing weights, full, not joined", TESTS, {**SMALL, **FULL_U, **APART}),
        ("FCG-U", DEMO, {"inducing_shape": (16, 16), **FULL_U, "join_bias": True}),
    ),
    *variants(FullCovarianceGuide, ("full covariance", EVERYWHERE, {})),
]

# Guides with dependent layers: a single weight has no distribution.
LAYERED = variants(GlobalInducingGuide, ("global inducing", DEMO + BENCHMARKS, {}))

# Guides of points, without a density over weights.
POINTS: list[GuideVariant] = [
    *variants(MAPGuide, ("points", TESTS, {}), ("MAP", DEMO + BENCHMARKS, {})),
    *variants(
        EnsembleGuide,
        ("Ensemble-W", DEMO, {"size": 5}),
        ("ensemble of 5", BENCHMARKS, {"size": 5}),
        ("ensemble of 5, in turn", BENCHMARKS, {"size": 5, "vectorize": False}),
    ),
    *variants(MCDropoutGuide, ("dropout", TESTS, {"rate": 0.2}), ("MC dropout", BENCHMARKS, {})),
]


def guides_for(place: Place, among: list[GuideVariant] = GUIDES) -> dict[str, GuideVariant]:
    """Return the guides that a place runs, those with a density over weights by default, by name."""
    return {guide.name: guide for guide in among if place in guide.used_in}


layered_for = partial(guides_for, among=LAYERED)
points_for = partial(guides_for, among=POINTS)
