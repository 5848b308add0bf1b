"""Families: the variational parameters of one site, one family per file."""

from pyro_structvi.families.bounds import capped, capped_log, uncapped
from pyro_structvi.families.cholesky_parameters import cholesky_factor, initial_factor
from pyro_structvi.families.dropout import Dropout
from pyro_structvi.families.family import Family, MatrixFamily
from pyro_structvi.families.full_covariance import FullCovariance
from pyro_structvi.families.inducing import InducingWeights
from pyro_structvi.families.k_tied import KTied
from pyro_structvi.families.low_rank import LowRank
from pyro_structvi.families.matrix_normal import MatrixNormal
from pyro_structvi.families.mean_field import MeanField
from pyro_structvi.families.members import Members
from pyro_structvi.families.memory_limit import MemoryLimitedFamily
from pyro_structvi.families.point_estimate import PointEstimate
from pyro_structvi.families.pruned import PrunedMeanField
from pyro_structvi.families.rowwise import Rowwise
from pyro_structvi.families.site import JoinedBias, LatentSite, Plate
from pyro_structvi.families.site_posterior import SitePosterior
from pyro_structvi.families.subnetwork import Subnetwork
from pyro_structvi.families.transformed import (
    TransformedMeanField,
    bijection_at,
    bijection_onto,
)

__all__ = [
    # for users
    "Dropout",
    "FullCovariance",
    "InducingWeights",
    "KTied",
    "LowRank",
    "MatrixNormal",
    "MeanField",
    "Members",
    "PointEstimate",
    "PrunedMeanField",
    "Rowwise",
    "Subnetwork",
    "TransformedMeanField",
    # for authors of families
    "Family",
    "JoinedBias",
    "LatentSite",
    "MatrixFamily",
    "MemoryLimitedFamily",
    "Plate",
    "SitePosterior",
    "bijection_at",
    "bijection_onto",
    "capped",
    "capped_log",
    "cholesky_factor",
    "initial_factor",
    "uncapped",
]
