"""Exact tests of draws and tests of means, on draws that are known."""

import pyro.distributions as dist
import pytest
import torch

from pyro_structvi.testing.noise import assert_mean
from pyro_structvi.testing.weights import narrow_normal
from tests.unit_noise import assert_draws, draw_with_noise, unit_draws

MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
TRIL = torch.tensor([[2.0, 0.0], [3.0, 1.0]], dtype=torch.float64)
COVARIANCE = TRIL @ TRIL.mT


def correlated():
    return MEAN + (TRIL @ torch.randn(2, 1)).squeeze(-1)


def test_mean_and_covariance_are_exact_and_a_small_error_is_seen():
    found = assert_draws(correlated, MEAN, COVARIANCE)
    assert torch.equal(found.mean, MEAN)
    assert torch.equal(found.matrix, TRIL)
    for mean, covariance in ((MEAN + 1e-9, COVARIANCE), (MEAN, COVARIANCE * (1 + 1e-9))):
        with pytest.raises(AssertionError):
            assert_draws(correlated, mean, covariance)


def test_noise_is_given_back_after_an_error():
    before = torch.randn, torch.randn_like, torch.Tensor.normal_
    with pytest.raises(ZeroDivisionError):
        draw_with_noise(lambda: 1 / 0, None)
    assert before == (torch.randn, torch.randn_like, torch.Tensor.normal_)
    assert "normal_" not in vars(torch.Tensor)


def test_every_source_of_noise_is_replaced():
    for draw in (
        lambda: dist.Normal(MEAN, 3.0).rsample(),
        lambda: dist.MultivariateNormal(MEAN, 9 * torch.eye(2)).rsample(),
        lambda: MEAN + 3 * torch.randn_like(MEAN),
        lambda: torch.stack([1 + 3 * torch.randn(()), -2 + 3 * torch.randn(1).squeeze()]),
        lambda: torch.empty(2).normal_(0.0, 3.0) + MEAN,
    ):
        assert_draws(draw, MEAN, torch.eye(2).mul(9))


def test_entries_of_a_batch_must_be_independent():
    blocks = COVARIANCE.expand(2, 2, 2)
    assert_draws(lambda: torch.stack([correlated(), correlated()]), MEAN, blocks)
    with pytest.raises(AssertionError):
        assert_draws(lambda: correlated().expand(2, 2), MEAN, blocks)


def test_gradients_go_through():
    scale = torch.tensor(3.0, requires_grad=True)
    covariance = unit_draws(lambda: scale * torch.randn(2)).covariance
    torch.testing.assert_close(torch.autograd.grad(covariance.sum(), scale)[0], 4 * scale.detach())


def test_what_is_not_linear_is_refused():
    amounts = iter(range(1, 9))
    for draw, message in (
        (lambda: torch.rand(2), "not standard normal"),
        (lambda: torch.randn(2) * torch.bernoulli(torch.full((2,), 0.5)), "not standard normal"),
        (lambda: torch.randn(2).prod(), "not linear"),
        (lambda: torch.randn(2).abs(), "not linear"),
        (lambda: torch.randn(next(amounts)).sum(), "numbers of noise"),
    ):
        with pytest.raises(AssertionError, match=message):
            unit_draws(draw)


# ---- means ----------------------------------------------------------------------------------------


LOC = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
SCALE = torch.tensor([1.0, 0.8, 0.0], dtype=torch.float64)  # the last entry must be exact
SQUARES = LOC.square() + SCALE.square()


def draws(count=20_000):
    return LOC + SCALE * torch.randn(count, 3)


@pytest.mark.parametrize(
    ("samples", "mean", "what"),
    [
        (lambda: draws() + torch.tensor([0.06, 0.0, 0.0]), LOC, "the mean is off: entry 0"),
        (lambda: draws() + torch.tensor([0.0, 0.0, 0.01]), LOC, "the mean is off: entry 2"),
        (lambda: draws().square(), 1.08 * SQUARES, "the mean is off"),
        (lambda: draws() * float("nan"), LOC, "not finite"),
    ],
    ids=["mean", "without variance", "variance", "nan"],
)
def test_wrong_means_are_caught_and_right_ones_pass(samples, mean, what):
    assert_mean(draws(), LOC)
    assert_mean(draws().square(), SQUARES)
    with pytest.raises(AssertionError, match=what):
        assert_mean(samples(), mean)


def test_false_alarms_are_no_more_frequent_than_stated():
    """At a rate of 0.1, 200 trials raise 20 alarms at most on average; 44 or more has p < 1e-6."""
    for trial in (
        lambda: assert_mean(draws(500), LOC, 0.1),
        lambda: assert_mean(draws(1000).square(), SQUARES, 0.1),  # of skewed draws
    ):
        assert sum(raises(trial) for _ in range(200)) < 44


def raises(trial):
    try:
        trial()
    except AssertionError:
        return True
    return False


def test_singular_covariances_have_no_inverse():
    for _ in range(100):
        away = torch.randn(3, 4, dtype=torch.float64)
        away = away - away.mean(0)
        assert narrow_normal(away[0], away.mT @ away) is None
