"""Guides: which family goes on which site of a model."""

from pyro_structvi.guides.inducing_weights import InducingWeightGuide
from pyro_structvi.guides.memory_estimate import MemoryEstimate, estimate_memory
from pyro_structvi.guides.points import EnsembleGuide, MAPGuide, MCDropoutGuide
from pyro_structvi.guides.short_forms import (
    AutoLowRankLRT,
    FullCovarianceGuide,
    KTiedGuide,
    MatrixNormalGuide,
    MeanFieldGuide,
    RowwiseGuide,
)
from pyro_structvi.guides.structured import StructuredGuide
from pyro_structvi.guides.subnetwork import SubnetworkGuide

__all__ = [
    "AutoLowRankLRT",
    "EnsembleGuide",
    "FullCovarianceGuide",
    "InducingWeightGuide",
    "KTiedGuide",
    "MAPGuide",
    "MCDropoutGuide",
    "MatrixNormalGuide",
    "MemoryEstimate",
    "MeanFieldGuide",
    "RowwiseGuide",
    "StructuredGuide",
    "SubnetworkGuide",
    "estimate_memory",
]
