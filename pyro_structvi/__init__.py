"""Structured variational inference for Bayesian neural networks in Pyro."""

from pyro_structvi.guides import KTiedGuide, MeanFieldGuide, StructuredGuide
from pyro_structvi.infer import LinearAnnealing, StructuredELBO
from pyro_structvi.nn import Classifier, FanIn, Regressor, bayesianize

__version__ = "0.1.0"

__all__ = [
    # making a model
    "Classifier",
    "FanIn",
    "Regressor",
    "bayesianize",
    # guides
    "KTiedGuide",
    "MeanFieldGuide",
    "StructuredGuide",
    # fitting
    "LinearAnnealing",
    "StructuredELBO",
]
