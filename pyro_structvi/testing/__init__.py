"""Every structure with its definition and its guides, for tests, examples, benchmarks and tables."""

from pyro_structvi.testing.entry import GuideVariant, Structure
from pyro_structvi.testing.structures import POINTS, STRUCTURES, guides_for, points_for

__all__ = ["POINTS", "STRUCTURES", "GuideVariant", "Structure", "guides_for", "points_for"]
