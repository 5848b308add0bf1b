"""The guides that the tests of models and objectives run over, from the registry of structures."""

import pytest

from pyro_structvi.testing import guides_for, points_for

GUIDES = guides_for("tests")
POINTS = points_for("tests")

# Their structures are in the tests with another setting: a joined bias or another diagonal.
TWINS = {
    "k-tied",
    "matrix normal",
    "rowwise, joined",
    "eigenbasis in blocks, not joined",
    "low rank",
}


def once(names, slow=()):
    """Mark the names of guides whose structure has another one, and of those that take long, as slow."""
    is_slow = TWINS | {*slow}
    return [pytest.param(name, marks=pytest.mark.slow if name in is_slow else ()) for name in names]


# For tests of some seconds each.
GUIDE_NAMES = once(GUIDES, ("inducing weights, full, not joined", "inducing weights, ensemble"))
