"""The statistical tests themselves: they let right samplers pass, and catch wrong ones."""

import pytest
import torch

from tests.statistics import assert_mean, assert_moments

MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.4, 0.0], [-0.2, 0.1, 0.3]], dtype=torch.float64)
COVARIANCE = ROOT @ ROOT.mT


def draws(count=20_000):
    return MEAN + torch.randn(count, 3) @ ROOT.mT


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda: draws() + torch.tensor([0.06, 0.0, 0.0]), "the mean is off: entry 0"),
        (lambda: MEAN + 1.08 * (draws() - MEAN), "the covariance is off"),
        (lambda: MEAN + torch.randn(20_000, 3) * COVARIANCE.diagonal().sqrt(), "covariance is off"),
        (lambda: draws() * float("nan"), "not finite"),
    ],
    ids=["mean", "variance", "correlation", "nan"],
)
def test_wrong_moments_are_caught_and_right_ones_pass(wrong, what):
    assert_moments(draws(), MEAN, COVARIANCE)
    with pytest.raises(AssertionError, match=what):
        assert_moments(wrong(), MEAN, COVARIANCE)


def test_an_entry_without_variance_must_be_exact():
    covariance = torch.diag(torch.tensor([1.0, 0.0]))
    samples = torch.stack([torch.randn(20_000), torch.zeros(20_000)], -1)
    assert_moments(samples, torch.zeros(2), covariance)
    with pytest.raises(AssertionError, match="the mean is off: entry 1"):
        assert_moments(samples + torch.tensor([0.0, 0.01]), torch.zeros(2), covariance)


def test_false_alarms_are_no_more_frequent_than_stated():
    """At a rate of 0.1, 200 trials raise 20 alarms at most on average; 44 or more has p < 1e-6."""
    squares = MEAN.square() + COVARIANCE.diagonal()
    for trial in (
        lambda: assert_moments(draws(500), MEAN, COVARIANCE, 0.1),
        lambda: assert_mean(draws(1000).square(), squares, 0.1),  # of skewed draws
    ):
        assert sum(raises(trial) for _ in range(200)) < 44
    assert raises(lambda: assert_mean(draws(4000).square(), 1.15 * squares))


def raises(trial):
    try:
        trial()
    except AssertionError:
        return True
    return False
