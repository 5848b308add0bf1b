"""Distributions over weights, each with its image under a linear map."""

from pyro_structvi.distributions.auxiliary import Auxiliary
from pyro_structvi.distributions.dropout import BernoulliDropout
from pyro_structvi.distributions.full import FullNormal
from pyro_structvi.distributions.gaussian_weight import GaussianWeight
from pyro_structvi.distributions.inducing import (
    AugmentedMatrixNormal,
    ConditionalNormal,
    InducingNormal,
)
from pyro_structvi.distributions.k_tied import KTiedNormal
from pyro_structvi.distributions.kl_to_normals import JoinedPrior
from pyro_structvi.distributions.low_rank import LowRankNormal
from pyro_structvi.distributions.matrix_normal import MatrixNormal
from pyro_structvi.distributions.mean_field import LogScaleNormal, MeanFieldNormal
from pyro_structvi.distributions.point_mass import PointMass
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.distributions.pruned import PrunedNormal
from pyro_structvi.distributions.rowwise import RowwiseNormal
from pyro_structvi.distributions.scale_mixture import ScaleMixtureNormal
from pyro_structvi.distributions.weight_distribution import WeightDistribution

__all__ = [
    "AugmentedMatrixNormal",
    "Auxiliary",
    "BernoulliDropout",
    "ConditionalNormal",
    "FullNormal",
    "GaussianWeight",
    "InducingNormal",
    "JoinedPrior",
    "KTiedNormal",
    "LogScaleNormal",
    "LowRankNormal",
    "MatrixNormal",
    "MeanFieldNormal",
    "PointMass",
    "PointMixture",
    "PrunedNormal",
    "RowwiseNormal",
    "ScaleMixtureNormal",
    "WeightDistribution",
]
