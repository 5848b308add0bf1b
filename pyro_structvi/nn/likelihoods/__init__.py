"""Likelihoods: a net becomes a model of classes, labels, counts, tokens or real targets."""

from pyro_structvi.nn.likelihoods.classifier import Classifier
from pyro_structvi.nn.likelihoods.counts import PoissonRegressor
from pyro_structvi.nn.likelihoods.labels import BinaryClassifier
from pyro_structvi.nn.likelihoods.likelihood import Likelihood
from pyro_structvi.nn.likelihoods.regressor import Regressor
from pyro_structvi.nn.likelihoods.tokens import TokenClassifier

__all__ = [
    "BinaryClassifier",
    "Classifier",
    "Likelihood",
    "PoissonRegressor",
    "Regressor",
    "TokenClassifier",
]
