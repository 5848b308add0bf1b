"""Families: the variational parameters of one site, one family per file."""

from pyro_structvi.families.dropout import Dropout
from pyro_structvi.families.family import (
    Family,
    JoinedBias,
    LatentSite,
    MatrixFamily,
    Plate,
    SitePosterior,
)
from pyro_structvi.families.full_covariance import FullCovariance
from pyro_structvi.families.inducing import InducingWeights
from pyro_structvi.families.k_tied import KTied
from pyro_structvi.families.low_rank import LowRank
from pyro_structvi.families.matrix_normal import MatrixGaussian
from pyro_structvi.families.mean_field import MeanField
from pyro_structvi.families.members import Members
from pyro_structvi.families.point_estimate import PointEstimate
from pyro_structvi.families.pruned import PrunedMeanField
from pyro_structvi.families.rowwise import Rowwise
from pyro_structvi.families.subnetwork import Subnetwork
from pyro_structvi.families.transformed import TransformedMeanField

__all__ = [
    "Dropout",
    "Family",
    "FullCovariance",
    "InducingWeights",
    "JoinedBias",
    "KTied",
    "LatentSite",
    "LowRank",
    "MatrixFamily",
    "MatrixGaussian",
    "MeanField",
    "Members",
    "Plate",
    "PointEstimate",
    "PrunedMeanField",
    "Rowwise",
    "SitePosterior",
    "Subnetwork",
    "TransformedMeanField",
]
