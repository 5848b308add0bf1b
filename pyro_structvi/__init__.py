"""Structured variational inference for Bayesian neural networks in Pyro."""

from importlib import import_module
from types import ModuleType

from pyro_structvi import guides
from pyro_structvi.guides import *  # noqa: F403  (its names are listed there)
from pyro_structvi.infer import CompiledSVI, LinearAnnealing, StructuredELBO, fit
from pyro_structvi.nn import (
    Classifier,
    FanIn,
    HierarchicalScale,
    RankOne,
    Regressor,
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
    "Classifier",
    "FanIn",
    "HierarchicalScale",
    "RankOne",
    "Regressor",
    "WalshHadamard",
    "bayesianize",
    # fitting
    "CompiledSVI",
    "LinearAnnealing",
    "StructuredELBO",
    "fit",
    # using the posterior
    "predict",
    "pruning",
    "subnetwork",
    "to_inference_data",
    "warm_start",
]

__all__ += guides.__all__

# These need optional packages, so they are imported when they are first asked for.
_OPTIONAL = ("metrics", "plots", "reference")


def __getattr__(name: str) -> ModuleType:
    """Import an optional submodule, such as ``pyro_structvi.reference``."""
    if name in _OPTIONAL:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
