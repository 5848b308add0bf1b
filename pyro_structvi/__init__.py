"""Structured variational inference for Bayesian neural networks in Pyro."""

from importlib import import_module
from types import ModuleType

from pyro_structvi import distributions, families, moments
from pyro_structvi.guides import (
    AutoLowRankLRT,
    EnsembleGuide,
    FullCovarianceGuide,
    GlobalInducingGuide,
    InducingWeightGuide,
    KTiedGuide,
    MAPGuide,
    MatrixNormalGuide,
    MCDropoutGuide,
    MeanFieldGuide,
    RowwiseGuide,
    StructuredGuide,
    SubnetworkGuide,
    estimate_memory,
)
from pyro_structvi.infer import (
    CompiledSVI,
    LinearAnnealing,
    StructuredAdam,
    StructuredELBO,
    TensorBoard,
    fit,
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
    element_scores as subnetwork,
)
from pyro_structvi.posterior import (
    predict,
    pruning,
    to_inference_data,
    warm_start,
)

__version__ = "0.1.0"

__all__ = [
    # making a model
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
    "FullCovarianceGuide",
    "KTiedGuide",
    "MatrixNormalGuide",
    "MeanFieldGuide",
    "RowwiseGuide",
    "EnsembleGuide",
    "GlobalInducingGuide",
    "InducingWeightGuide",
    "MAPGuide",
    "MCDropoutGuide",
    "StructuredGuide",
    "SubnetworkGuide",
    "estimate_memory",
    # fitting
    "CompiledSVI",
    "LinearAnnealing",
    "StructuredAdam",
    "StructuredELBO",
    "TensorBoard",
    "fit",
    # for models and guides of your own
    "distributions",
    "families",
    # using the posterior
    "moments",
    "predict",
    "pruning",
    "subnetwork",
    "to_inference_data",
    "warm_start",
]

# These need optional packages, so they are imported when they are first asked for.
_OPTIONAL = ("diagnostics", "metrics", "plots", "reference")


def __getattr__(name: str) -> ModuleType:
    """Import an optional submodule, such as ``pyro_structvi.reference``."""
    if name in _OPTIONAL:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
