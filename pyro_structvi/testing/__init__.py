"""Checks of the contracts for distributions, families and guides, and the registry of guides."""

from pyro_structvi.testing.distributions import check_distribution, random_weight
from pyro_structvi.testing.families import check_family
from pyro_structvi.testing.guides import check_guide
from pyro_structvi.testing.registry import (
    GUIDES,
    LAYERED,
    POINTS,
    GuideVariant,
    guides_for,
    layered_for,
    points_for,
)

__all__ = [
    "GUIDES",
    "LAYERED",
    "POINTS",
    "GuideVariant",
    "check_distribution",
    "check_family",
    "check_guide",
    "guides_for",
    "layered_for",
    "points_for",
    "random_weight",
]
