"""Distributions over weights, each with its image under a linear map."""

from pyro_structvi.structures.dropout import BernoulliDropout
from pyro_structvi.structures.eigenbasis import EigenbasisNormal
from pyro_structvi.structures.full_covariance import FullNormal
from pyro_structvi.structures.inducing.augmented import AugmentedMatrixNormal, ConditionalNormal
from pyro_structvi.structures.inducing.normal import InducingNormal
from pyro_structvi.structures.k_tied import KTiedNormal
from pyro_structvi.structures.low_rank import LowRankNormal
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.mean_field import LogScaleNormal, MeanFieldNormal, PrunedNormal
from pyro_structvi.structures.points import PointMixture
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.structures.scale_mixture import ScaleMixtureNormal
from pyro_structvi.structures.student_t import IsotropicStudentT
from pyro_structvi.weights.site_distributions import Auxiliary, JoinedPrior, PointMass
from pyro_structvi.weights.weight_distribution import GaussianWeight, WeightDistribution

__all__ = [
    "AugmentedMatrixNormal",
    "Auxiliary",
    "BernoulliDropout",
    "ConditionalNormal",
    "EigenbasisNormal",
    "FullNormal",
    "GaussianWeight",
    "InducingNormal",
    "IsotropicStudentT",
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
