"""Every structure with its definition and its guides, for tests, examples, benchmarks and tables."""

from pyro_structvi.testing.entry import GuideVariant, Structure
from pyro_structvi.testing.structures import (
    LAYERED,
    POINTS,
    STRUCTURES,
    guides_for,
    layered_for,
    points_for,
)

__all__ = [
    "LAYERED",
    "POINTS",
    "STRUCTURES",
    "GuideVariant",
    "Structure",
    "guides_for",
    "layered_for",
    "points_for",
]
