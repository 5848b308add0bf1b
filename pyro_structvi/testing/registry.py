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
from pyro_structvi.structures.points import MAPGuide
from pyro_structvi.structures.rowwise import RowwiseGuide

Place = Literal["tests", "demo", "benchmarks"]

TESTS: tuple[Place, ...] = ("tests",)
DEMO: tuple[Place, ...] = ("demo",)
BENCHMARKS: tuple[Place, ...] = ("benchmarks",)
EVERYWHERE = TESTS + DEMO + BENCHMARKS


@dataclass(frozen=True)
class GuideVariant:
    """A guide with its options, under a name in tests and tables, and the places that run it.

    A call with a model, and further options, makes the guide.
    """

    name: str
    guide: Callable[..., StructuredGuide]
    options: Mapping[str, Any] = field(default_factory=dict)
    used_in: tuple[Place, ...] = EVERYWHERE

    def __call__(self, model: Callable[..., Any], **options: Any) -> StructuredGuide:
        """Make the guide of a model."""
        return self.guide(model, **{**self.options, **options})


Options = dict[str, Any]
ENSEMBLE_U, FULL_U = {"inducing_posterior": "ensemble"}, {"inducing_posterior": "full"}
ENSEMBLE_OF_3 = Options(inducing_posterior="ensemble", ensemble_size=3)
MIXTURE: Options = {"make_guide": KTiedGuide, "size": 5}
SMALL, DEMO_U, LARGE = (Options(inducing_shape=size) for size in ((3, 2), (16, 16), (64, 64)))
JOINED, APART = {"join_bias": True}, {"join_bias": False}  # biases
CONSTANT: Options = {"diagonal": "constant"}


def _table(*rows: tuple[Any, ...]) -> list[GuideVariant]:
    return [GuideVariant(*row) for row in rows]


# Guides with a density over weights.
GUIDES = _table(
    ("mean field, drawn", MeanFieldGuide, {"local_reparam": False}, DEMO + BENCHMARKS),
    ("mean field", MeanFieldGuide),
    ("mean field, flipout", MeanFieldGuide, {"local_reparam": "flipout"}, BENCHMARKS),
    ("k-tied", KTiedGuide, APART, TESTS),
    ("k-tied, joined", KTiedGuide, JOINED, TESTS),
    ("k-tied, k = 1", KTiedGuide, {"rank": 1} | APART, DEMO + BENCHMARKS),
    ("k-tied, k = 2", KTiedGuide, {"rank": 2} | APART, DEMO + BENCHMARKS),
    ("matrix normal", MatrixNormalGuide, APART, TESTS + BENCHMARKS),
    ("matrix normal, joined", MatrixNormalGuide, JOINED, TESTS + DEMO),
    ("eigenbasis", EigenbasisGuide),
    ("eigenbasis in blocks, not joined", EigenbasisGuide, {"block_size": 2} | APART, TESTS),
    ("mixture of 5, k-tied", MixtureGuide, MIXTURE, DEMO + BENCHMARKS),
    ("rowwise", RowwiseGuide, APART, TESTS + BENCHMARKS),
    ("rowwise, joined", RowwiseGuide, JOINED, TESTS + DEMO),
    ("low rank", AutoLowRankLRT, {"rank": 2} | CONSTANT | APART, TESTS),
    ("low rank and full diagonal, joined", AutoLowRankLRT, {"rank": 2} | JOINED, TESTS),
    ("low rank, K = 1", AutoLowRankLRT, {"rank": 1} | CONSTANT | APART, BENCHMARKS),
    ("low rank, K = 2", AutoLowRankLRT, {"rank": 2} | CONSTANT | APART, BENCHMARKS),
    ("low rank, K = 5", AutoLowRankLRT, {"rank": 5} | CONSTANT | APART, BENCHMARKS),
    ("low rank, K = 5, joined", AutoLowRankLRT, {"rank": 5} | CONSTANT | JOINED, DEMO),
    ("low rank, full diagonal", AutoLowRankLRT, {"rank": 5, "diagonal": "full"} | JOINED, DEMO),
    ("inducing weights, ensemble", InducingWeightGuide, SMALL | ENSEMBLE_OF_3, TESTS),
    ("Ensemble-U", InducingWeightGuide, DEMO_U | ENSEMBLE_U | {"ensemble_size": 5}, DEMO),
    ("inducing weights", InducingWeightGuide, SMALL, TESTS),
    ("FFG-U", InducingWeightGuide, DEMO_U, DEMO),
    ("FFG-U, 64 x 64", InducingWeightGuide, LARGE, DEMO),
    ("inducing 64", InducingWeightGuide, LARGE, BENCHMARKS),
    ("inducing 64, drawn", InducingWeightGuide, LARGE | {"local_reparam": False}, BENCHMARKS),
    ("inducing weights, full, not joined", InducingWeightGuide, SMALL | FULL_U | APART, TESTS),
    ("FCG-U", InducingWeightGuide, DEMO_U | FULL_U | JOINED, DEMO),
    ("full covariance", FullCovarianceGuide),
)

# Guides with dependent layers: a single weight has no distribution.
LAYERED = _table(("global inducing", GlobalInducingGuide, {}, DEMO + BENCHMARKS))

# Guides of points, without a density over weights.
POINTS = _table(
    ("points", MAPGuide, {}, TESTS),
    ("MAP", MAPGuide, {}, DEMO + BENCHMARKS),
    ("Ensemble-W", EnsembleGuide, {"size": 5}, DEMO),
    ("ensemble of 5", EnsembleGuide, {"size": 5}, BENCHMARKS),
    ("ensemble of 5, in turn", EnsembleGuide, {"size": 5, "vectorize": False}, BENCHMARKS),
    ("dropout", MCDropoutGuide, {"rate": 0.2}, TESTS),
    ("MC dropout", MCDropoutGuide, {}, BENCHMARKS),
)


def guides_for(place: Place, among: list[GuideVariant] = GUIDES) -> dict[str, GuideVariant]:
    """Return the guides that a place runs, those with a density over weights by default, by name."""
    return {guide.name: guide for guide in among if place in guide.used_in}


layered_for = partial(guides_for, among=LAYERED)
points_for = partial(guides_for, among=POINTS)
