"""Schedules."""

import pytest

from pyro_structvi.infer import CosineDecay, LinearAnnealing


def test_linear_annealing():
    schedule = LinearAnnealing(4, start=0.2, end=1.0)
    assert [schedule(step) for step in (0, 1, 4, 9)] == pytest.approx([0.2, 0.4, 1.0, 1.0])


def test_cosine_decay():
    schedule = CosineDecay(4, start=2.0, end=0.2)
    assert [schedule(step) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.1, 0.2, 0.2])


@pytest.mark.parametrize("schedule", [LinearAnnealing, CosineDecay])
@pytest.mark.parametrize("steps", [0, -3, 2.5])
def test_num_steps_must_be_a_whole_number(schedule, steps):
    with pytest.raises(ValueError, match="`num_steps` must be a whole number of at least 1"):
        schedule(steps)


@pytest.mark.parametrize("schedule", [LinearAnnealing, CosineDecay])
@pytest.mark.parametrize("name", ["start", "end"])
def test_values_must_not_be_negative(schedule, name):
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number of at least 0"):
        schedule(10, **{name: -0.1})
