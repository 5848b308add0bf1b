"""Distributions over weights, each with its image under a linear map."""

from pyro_structvi.distributions.full import FullNormal
from pyro_structvi.distributions.k_tied import KTiedNormal
from pyro_structvi.distributions.kl_to_normals import JoinedPrior
from pyro_structvi.distributions.low_rank import LowRankNormal
from pyro_structvi.distributions.mean_field import MeanFieldNormal
from pyro_structvi.distributions.weight_distribution import WeightDistribution

__all__ = [
    "FullNormal",
    "JoinedPrior",
    "KTiedNormal",
    "LowRankNormal",
    "MeanFieldNormal",
    "WeightDistribution",
]
