"""Guides: which family goes on which site of a model."""

from pyro_structvi.guides.inducing_weights import InducingWeightGuide
from pyro_structvi.guides.short_forms import (
    AutoLowRankLRT,
    FullCovarianceGuide,
    KTiedGuide,
    MatrixNormalGuide,
    MeanFieldGuide,
)
from pyro_structvi.guides.structured import StructuredGuide

__all__ = [
    "AutoLowRankLRT",
    "FullCovarianceGuide",
    "InducingWeightGuide",
    "KTiedGuide",
    "MatrixNormalGuide",
    "MeanFieldGuide",
    "StructuredGuide",
]
