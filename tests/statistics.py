"""Tests of samplers that say how often they raise a false alarm."""

import torch

from pyro_structvi.testing.noise import assert_below, assert_mean, two_sided_bound

__all__ = ["assert_mean", "assert_moments"]


def assert_moments(samples, mean, covariance, false_alarm=1e-6):
    """Assert that draws of a normal vector have the stated mean and covariance.

    Every entry of the mean and of the covariance is a z-test with the variance it has under the
    stated distribution,

        Var(sample mean_i) = S_ii / n,   Var(sample covariance_ij) = (S_ii S_jj + S_ij^2) / (n - 1).

    A sample covariance is skewed: its bound is widened by the first term of its Cornish-Fisher
    expansion. All entries together raise an alarm with probability ``false_alarm`` at most (Bonferroni).
    Entries without variance must be exact to rounding.

    Args:
        samples: Independent draws ``(n, *shape)``.
        mean: ``(*shape)``.
        covariance: ``(D, D)`` over the flattened shape.
        false_alarm: Probability of failing although the distribution is right.
    """
    samples, mean = (
        samples.detach().double().reshape(len(samples), -1),
        mean.detach().double().flatten(),
    )
    covariance = covariance.detach().double()
    count, size = samples.shape
    assert torch.isfinite(samples).all(), "a draw is not finite"
    bound = two_sided_bound(false_alarm / (size + size * (size + 1) / 2))
    variance = covariance.diagonal()
    assert_below(
        "mean", samples.mean(0) - mean, (variance / count).sqrt(), torch.full_like(mean, bound)
    )
    centred = samples - samples.mean(0)
    product = variance.unsqueeze(-1) * variance
    spread = product + covariance.square()
    third_cumulant = 2 * covariance.abs() * (covariance.square() + 3 * product)
    skewness = third_cumulant / spread.clamp_min(1e-200).pow(1.5) / (count - 1) ** 0.5
    assert_below(
        "covariance",
        centred.mT @ centred / (count - 1) - covariance,
        (spread / (count - 1)).sqrt(),
        bound + skewness * (bound**2 - 1) / 6,
    )
