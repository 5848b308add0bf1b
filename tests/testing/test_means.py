"""The test of means: it lets right samplers pass, and catches wrong ones."""

import pytest
import torch

from pyro_structvi.testing.noise import assert_mean

MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
SCALE = torch.tensor([1.0, 0.8, 0.0], dtype=torch.float64)  # the last entry must be exact
SQUARES = MEAN.square() + SCALE.square()


def draws(count=20_000):
    return MEAN + SCALE * torch.randn(count, 3)


@pytest.mark.parametrize(
    ("samples", "mean", "what"),
    [
        (lambda: draws() + torch.tensor([0.06, 0.0, 0.0]), MEAN, "the mean is off: entry 0"),
        (lambda: draws() + torch.tensor([0.0, 0.0, 0.01]), MEAN, "the mean is off: entry 2"),
        (lambda: draws().square(), 1.08 * SQUARES, "the mean is off"),
        (lambda: draws() * float("nan"), MEAN, "not finite"),
    ],
    ids=["mean", "without variance", "variance", "nan"],
)
def test_wrong_means_are_caught_and_right_ones_pass(samples, mean, what):
    assert_mean(draws(), MEAN)
    assert_mean(draws().square(), SQUARES)
    with pytest.raises(AssertionError, match=what):
        assert_mean(samples(), mean)


def test_false_alarms_are_no_more_frequent_than_stated():
    """At a rate of 0.1, 200 trials raise 20 alarms at most on average; 44 or more has p < 1e-6."""
    for trial in (
        lambda: assert_mean(draws(500), MEAN, 0.1),
        lambda: assert_mean(draws(1000).square(), SQUARES, 0.1),  # of skewed draws
    ):
        assert sum(raises(trial) for _ in range(200)) < 44


def raises(trial):
    try:
        trial()
    except AssertionError:
        return True
    return False
