"""Checks of the contracts for distributions, families and guides, and the registry of structures."""

from pyro_structvi.testing.distributions import check_distribution
from pyro_structvi.testing.entry import GuideVariant, Structure, random_weight
from pyro_structvi.testing.families import check_family
from pyro_structvi.testing.guides import check_guide
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
    "check_distribution",
    "check_family",
    "check_guide",
    "guides_for",
    "layered_for",
    "points_for",
    "random_weight",
]
