"""The guides that the tests of models and objectives run over, from the registry of structures."""

import pytest

from pyro_structvi.testing import guides_for, points_for

GUIDES = guides_for("tests")
POINTS = points_for("tests")

SLOW = ("inducing weights, full, not joined", "inducing weights, ensemble")

# For tests of some seconds each.
GUIDE_NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in GUIDES
]
