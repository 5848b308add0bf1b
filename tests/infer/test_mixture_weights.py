"""Weights of members by the densities of held-out data."""

import pytest
import scipy.optimize
import torch

from pyro_structvi.infer.mixture_weights import TOLERANCE, _stacked


def by_scipy(log_densities):
    """Maximize the mean log density by sequential quadratic programming."""
    densities = log_densities.exp().numpy()
    number = densities.shape[1]
    found = scipy.optimize.minimize(
        lambda weights: -torch.tensor(densities @ weights).log().mean().item(),
        [1 / number] * number,
        bounds=[(0, 1)] * number,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
        options={"ftol": 1e-15},
    )
    return torch.tensor(found.x)


@pytest.mark.parametrize("seed", range(4))
def test_stacked_weights_are_those_of_another_solver(seed):
    """Members of which some have nearly no weight: expectation maximization takes thousands of steps."""
    torch.manual_seed(seed)
    scales = torch.arange(1.0, 6.0)
    log_densities = -0.5 * (torch.randn(100, 1) + 0.2 * torch.randn(100, 5) * scales).square()
    found = _stacked(log_densities)
    torch.testing.assert_close(found, by_scipy(log_densities), rtol=0, atol=1e-4)
    assert found.min() < 1e-6
    gradient = (log_densities - (log_densities.exp() @ found).log().unsqueeze(-1)).exp().mean(0)
    assert gradient.max() - 1 < TOLERANCE


def test_stacked_weights_of_equal_and_of_impossible_members():
    log_densities = torch.randn(20, 3)
    same = torch.cat([log_densities, log_densities[:, :1]], -1)
    found, alone = _stacked(same), _stacked(log_densities)
    torch.testing.assert_close(found[0] + found[3], alone[0], rtol=0, atol=1e-4)
    log_densities[:, 2] = -torch.inf
    found = _stacked(1000 * log_densities)
    assert found[2] < 1e-8
    torch.testing.assert_close(found.sum(), torch.ones(()))
