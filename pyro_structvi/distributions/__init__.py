"""Distributions over weights, one structure per file."""

from pyro_structvi.distributions.k_tied import KTiedNormal
from pyro_structvi.distributions.mean_field import MeanFieldNormal
from pyro_structvi.distributions.weight_distribution import WeightDistribution

__all__ = ["KTiedNormal", "MeanFieldNormal", "WeightDistribution"]
