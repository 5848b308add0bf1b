"""Conformal intervals and sets: the theorem of their coverage, and cases by hand."""

import math

import pytest
import torch

from pyro_structvi.metrics import conformal_interval, conformal_sets
from tests.predictions import normal_prediction

REPEATS, NEW = 500, 40


def assert_covered(found, rank, size):
    """Given the data, the coverage is Beta(k, n + 1 - k): its mean k / (n + 1) within 5 deviations.

    A false alarm has a probability of 6e-7.
    """
    mean = rank / (size + 1)
    of_data = mean * (1 - mean) / (size + 2)
    deviation = math.sqrt((of_data + mean * (1 - mean) / NEW) / REPEATS)
    assert abs(found - mean) < 5 * deviation


@pytest.mark.parametrize(("size", "level", "rank"), [(9, 0.8, 8), (19, 0.5, 10), (30, 0.9, 28)])
def test_intervals_of_a_wrong_model_have_the_coverage_of_the_theorem(size, level, rank):
    """The model has a bias, and a fifth of the standard deviation; each element is a repetition."""
    y, calibration_y = torch.randn(NEW, REPEATS), torch.randn(size, REPEATS)
    parts = [normal_prediction(torch.full(each.shape, 0.7), 0.2) for each in (y, calibration_y)]
    low, high = conformal_interval(*parts, calibration_y, level)
    assert_covered(((low <= y) & (y <= high)).double().mean().item(), rank, size)


@pytest.mark.parametrize(("size", "level", "rank"), [(9, 0.8, 8), (30, 0.9, 28)])
def test_sets_of_a_wrong_model_have_the_coverage_of_the_theorem(size, level, rank):
    """Classes of three are drawn without regard to the probabilities, which have no ties."""
    inside = 0.0
    for _ in range(REPEATS):
        probabilities = torch.randn(NEW + size, 3).softmax(-1)
        y = torch.randint(3, (NEW + size,))
        sets = conformal_sets(probabilities[:NEW], probabilities[NEW:], y[NEW:], level)
        inside += sets[torch.arange(NEW), y[:NEW]].double().mean().item() / REPEATS
    assert_covered(inside, rank, size)


def test_each_element_of_a_target_has_its_own_shift():
    calibration = normal_prediction(torch.zeros(4, 2), 1.0)
    y = torch.tensor([[0.0, 5.0], [0.1, -6.0], [0.2, 7.0], [0.3, 8.0]])
    prediction = normal_prediction(torch.ones(3, 2), 1.0)
    low, high = conformal_interval(prediction, calibration, y, 0.5)
    own_low, own_high = prediction.interval(0.5)
    half = (own_high - own_low)[0, 0] / 2
    shift = torch.stack([0.2 - half, 7.0 - half])  # the third of four, by k = 3
    torch.testing.assert_close(own_low - low, shift.expand(3, 2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(high - own_high, shift.expand(3, 2), rtol=1e-6, atol=1e-6)


def test_few_examples_give_everything():
    parts = [normal_prediction(torch.zeros(n), 1.0) for n in (3, 8)]
    low, high = conformal_interval(*parts, torch.randn(8), 0.9)
    assert torch.equal(high, torch.full((3,), math.inf))
    assert torch.equal(low, -high)
    some = torch.full((8, 2), 0.5)
    assert conformal_sets(some[:3], some, torch.zeros(8, dtype=torch.long), 0.9).all()


def test_targets_and_classes_must_fit():
    parts = [normal_prediction(torch.zeros(n), 1.0) for n in (3, 8)]
    with pytest.raises(ValueError, match="`y` must have shape"):
        conformal_interval(*parts, torch.randn(7))
    some = torch.full((8, 2), 0.5)
    with pytest.raises(ValueError, match="`probabilities` must have shape"):
        conformal_sets(torch.full((4, 4), 0.25), some, torch.zeros(8, dtype=torch.long))
