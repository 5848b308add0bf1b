"""Guides: which family goes on which site of a model."""

from pyro_structvi.sites.autoguide import (
    LocalLatentWarning,
    ModelStateWarning,
    NewParametersWarning,
)
from pyro_structvi.sites.finding import OtherRowsWarning, UnusedSiteWarning
from pyro_structvi.sites.report import GuideReport, MemoryEstimate, ParameterReport, estimate_memory
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.dropout import MCDropoutGuide
from pyro_structvi.structures.eigenbasis import EigenbasisGuide
from pyro_structvi.structures.full_covariance import FullCovarianceGuide
from pyro_structvi.structures.global_inducing.guide import GlobalInducingGuide
from pyro_structvi.structures.inducing.family import InducingWeightGuide
from pyro_structvi.structures.k_tied import KTiedGuide
from pyro_structvi.structures.low_rank import AutoLowRankLRT, LowRankGuide
from pyro_structvi.structures.matrix_normal import MatrixNormalGuide
from pyro_structvi.structures.mean_field import MeanFieldGuide
from pyro_structvi.structures.mixture import EnsembleGuide, MixtureGuide
from pyro_structvi.structures.points import MAPGuide
from pyro_structvi.structures.rowwise import RowwiseGuide
from pyro_structvi.structures.subnetwork import SubnetworkGuide

__all__ = [
    "AutoLowRankLRT",
    "EigenbasisGuide",
    "FullCovarianceGuide",
    "KTiedGuide",
    "LowRankGuide",
    "MatrixNormalGuide",
    "MeanFieldGuide",
    "RowwiseGuide",
    "EnsembleGuide",
    "GlobalInducingGuide",
    "GuideReport",
    "InducingWeightGuide",
    "LocalLatentWarning",
    "MAPGuide",
    "MCDropoutGuide",
    "MemoryEstimate",
    "MixtureGuide",
    "NewParametersWarning",
    "ModelStateWarning",
    "OtherRowsWarning",
    "ParameterReport",
    "StructuredGuide",
    "SubnetworkGuide",
    "UnusedSiteWarning",
    "estimate_memory",
]
