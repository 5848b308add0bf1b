"""Families: the variational parameters of one site, one family per file."""

from pyro_structvi.sites.family import Family, MatrixFamily, MemoryLimitedFamily
from pyro_structvi.sites.latent_site import (
    JoinedBias,
    LatentSite,
    Plate,
    bijection_at,
    bijection_onto,
)
from pyro_structvi.sites.parameterization import (
    capped,
    capped_log,
    cholesky_factor,
    initial_factor,
    uncapped,
)
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.structures.dropout import Dropout
from pyro_structvi.structures.ensemble import Members
from pyro_structvi.structures.full_covariance import FullCovariance
from pyro_structvi.structures.inducing.family import InducingWeights
from pyro_structvi.structures.k_tied import KTied
from pyro_structvi.structures.low_rank import LowRank
from pyro_structvi.structures.matrix_normal import MatrixNormalFamily
from pyro_structvi.structures.mean_field import MeanField
from pyro_structvi.structures.point_estimate import PointEstimate
from pyro_structvi.structures.pruned import PrunedMeanField
from pyro_structvi.structures.rowwise import Rowwise
from pyro_structvi.structures.subnetwork import Subnetwork
from pyro_structvi.structures.transformed import TransformedMeanField

__all__ = [
    # for users
    "Dropout",
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
