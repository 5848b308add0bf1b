"""Estimators of scikit-learn for tables: Bayesian multi-layer perceptrons."""

from pyro_structvi.sklearn.estimators import (
    BayesianMLPClassifier,
    BayesianMLPRegressor,
    RepeatedTargetsWarning,
)

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor", "RepeatedTargetsWarning"]
