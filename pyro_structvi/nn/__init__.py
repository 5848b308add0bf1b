"""Nets with priors, and likelihoods around them."""

from pyro_structvi.nn.bayesianize import PointEstimateWarning, bayesianize
from pyro_structvi.nn.likelihoods import Classifier, Regressor
from pyro_structvi.nn.priors import FanIn

__all__ = ["Classifier", "FanIn", "PointEstimateWarning", "Regressor", "bayesianize"]
