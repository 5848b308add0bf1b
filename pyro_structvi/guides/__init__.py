"""Guides: which family goes on which site of a model."""

from pyro_structvi.guides.short_forms import (
    AutoLowRankLRT,
    FullCovarianceGuide,
    KTiedGuide,
    MeanFieldGuide,
)
from pyro_structvi.guides.structured import StructuredGuide

__all__ = [
    "AutoLowRankLRT",
    "FullCovarianceGuide",
    "KTiedGuide",
    "MeanFieldGuide",
    "StructuredGuide",
]
