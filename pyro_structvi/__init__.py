"""Structured variational inference for Bayesian neural networks in Pyro."""

from importlib import import_module
from types import ModuleType

from pyro_structvi import moments
from pyro_structvi.guides import (
    EnsembleGuide,
    GlobalInducingGuide,
    InducingWeightGuide,
    MAPGuide,
    MCDropoutGuide,
    StructuredGuide,
    SubnetworkGuide,
    estimate_memory,
)
from pyro_structvi.guides import short_forms as _short_forms
from pyro_structvi.guides.short_forms import *  # noqa: F403  (its `__all__`: one line for a new guide)
from pyro_structvi.infer import (
    Checkpoint,
    CompiledSVI,
    LinearAnnealing,
    StructuredAdam,
    StructuredELBO,
    Validation,
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
    *_short_forms.__all__,
    "EnsembleGuide",
    "GlobalInducingGuide",
    "InducingWeightGuide",
    "MAPGuide",
    "MCDropoutGuide",
    "StructuredGuide",
    "SubnetworkGuide",
    "estimate_memory",
    # fitting
    "Checkpoint",
    "CompiledSVI",
    "LinearAnnealing",
    "StructuredAdam",
    "StructuredELBO",
    "Validation",
    "fit",
    # using the posterior
    "moments",
    "predict",
    "pruning",
    "subnetwork",
    "to_inference_data",
    "warm_start",
]

# These need optional packages, so they are imported when they are first asked for.
_OPTIONAL = ("diagnostics", "lightning", "metrics", "plots", "reference")


def __getattr__(name: str) -> ModuleType:
    """Import an optional submodule, such as ``pyro_structvi.reference``."""
    if name in _OPTIONAL:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
