"""Families of posteriors, for :class:`~pyro_structvi.StructuredGuide`."""

from pyro_structvi.structures.dropout import Dropout
from pyro_structvi.structures.eigenbasis import Eigenbasis
from pyro_structvi.structures.full_covariance import FullCovariance
from pyro_structvi.structures.inducing.family import InducingWeights
from pyro_structvi.structures.k_tied import KTied
from pyro_structvi.structures.low_rank import LowRank
from pyro_structvi.structures.matrix_normal import MatrixNormalFamily
from pyro_structvi.structures.mean_field import MeanField, PrunedMeanField, TransformedMeanField
from pyro_structvi.structures.points import Members, PointEstimate
from pyro_structvi.structures.rowwise import Rowwise
from pyro_structvi.structures.subnetwork import Subnetwork

__all__ = [
    "Dropout",
    "Eigenbasis",
    "FullCovariance",
    "InducingWeights",
    "KTied",
    "LowRank",
    "MatrixNormalFamily",
    "MeanField",
    "Members",
    "PointEstimate",
    "PrunedMeanField",
    "Rowwise",
    "Subnetwork",
    "TransformedMeanField",
]
