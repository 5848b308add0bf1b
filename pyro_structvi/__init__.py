"""Structured variational inference for Bayesian neural networks in Pyro."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from pyro_structvi import distributions, extend, families, guides, moments
from pyro_structvi.families import *  # noqa: F403  (a new family is named there alone)
from pyro_structvi.guides import (
    AutoLowRankLRT,
    EigenbasisGuide,
    EnsembleGuide,
    FullCovarianceGuide,
    GlobalInducingGuide,
    InducingWeightGuide,
    KTiedGuide,
    LowRankGuide,
    MAPGuide,
    MatrixNormalGuide,
    MCDropoutGuide,
    MeanFieldGuide,
    MixtureGuide,
    RowwiseGuide,
    StructuredGuide,
    SubnetworkGuide,
    estimate_memory,
)
from pyro_structvi.infer import (
    Checkpoint,
    CompiledSVI,
    LinearAnnealing,
    StructuredAdam,
    StructuredELBO,
    Validation,
    fit,
    weigh_by_bound,
    weigh_by_stacking,
)
from pyro_structvi.nn import (
    BinaryClassifier,
    Classifier,
    FanIn,
    HierarchicalScale,
    LastLayer,
    PoissonRegressor,
    RankOne,
    Regressor,
    TokenClassifier,
    WalshHadamard,
    bayesianize,
)
from pyro_structvi.posterior import (
    element_scores,
    load,
    predict,
    predict_moments,
    pruning,
    save,
    to_inference_data,
    warm_start,
)

if TYPE_CHECKING:
    from pyro_structvi import (  # noqa: F401, for `pyro_structvi.plots` and its kin
        botorch,
        diagnostics,
        lightning,
        metrics,
        plots,
        reference,
        sklearn,
        testing,
        transformers,
    )

__version__ = "0.1.0"

__all__ = [
    # models
    "BinaryClassifier",
    "Classifier",
    "FanIn",
    "HierarchicalScale",
    "LastLayer",
    "PoissonRegressor",
    "RankOne",
    "Regressor",
    "TokenClassifier",
    "WalshHadamard",
    "bayesianize",
    # guides
    "AutoLowRankLRT",
    "EigenbasisGuide",
    "EnsembleGuide",
    "FullCovarianceGuide",
    "GlobalInducingGuide",
    "InducingWeightGuide",
    "KTiedGuide",
    "LowRankGuide",
    "MAPGuide",
    "MCDropoutGuide",
    "MatrixNormalGuide",
    "MeanFieldGuide",
    "MixtureGuide",
    "RowwiseGuide",
    "StructuredGuide",
    "SubnetworkGuide",
    "estimate_memory",
    # families, for `StructuredGuide`
    *families.__all__,
    # inference
    "Checkpoint",
    "CompiledSVI",
    "LinearAnnealing",
    "StructuredAdam",
    "StructuredELBO",
    "Validation",
    "fit",
    "weigh_by_bound",
    "weigh_by_stacking",
    # posteriors
    "element_scores",
    "load",
    "moments",
    "predict",
    "predict_moments",
    "pruning",
    "save",
    "to_inference_data",
    "warm_start",
    # lists of names
    "distributions",
    "extend",
    "families",
    "guides",
]

# These need optional packages, so they are imported when they are first asked for.
_OPTIONAL = (
    "botorch",
    "diagnostics",
    "lightning",
    "metrics",
    "plots",
    "reference",
    "sklearn",
    "testing",
    "transformers",
)


def __getattr__(name: str) -> ModuleType:
    """Import a part that needs optional packages, when it is first asked for."""
    if name in _OPTIONAL:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPTIONAL})
