"""Schedules."""

import pytest

from pyro_structvi.infer import CosineDecay, LinearAnnealing


def test_linear_annealing():
    schedule = LinearAnnealing(4, start=0.2, end=1.0)
    assert [schedule(step) for step in (0, 1, 4, 9)] == pytest.approx([0.2, 0.4, 1.0, 1.0])


def test_cosine_decay():
    schedule = CosineDecay(4, start=2.0, end=0.2)
    assert [schedule(step) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.1, 0.2, 0.2])
