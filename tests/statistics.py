"""Tests of samplers that say how often they raise a false alarm."""

import torch


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
    bound = _two_sided_bound(false_alarm / (size + size * (size + 1) / 2))
    variance = covariance.diagonal()
    _assert_below(
        "mean", samples.mean(0) - mean, (variance / count).sqrt(), torch.full_like(mean, bound)
    )
    centred = samples - samples.mean(0)
    product = variance.unsqueeze(-1) * variance
    spread = product + covariance.square()
    third_cumulant = 2 * covariance.abs() * (covariance.square() + 3 * product)
    skewness = third_cumulant / spread.clamp_min(1e-200).pow(1.5) / (count - 1) ** 0.5
    _assert_below(
        "covariance",
        centred.mT @ centred / (count - 1) - covariance,
        (spread / (count - 1)).sqrt(),
        bound + skewness * (bound**2 - 1) / 6,
    )


def assert_mean(samples, expected, false_alarm=1e-6):
    """Assert that draws of any distribution with a few moments have the stated mean.

    Student's test for each entry. The bound is that of a z-test, widened by the first terms of the
    Cornish-Fisher expansion, for the degrees of freedom and for the skewness as estimated from the
    draws; meant for some hundred draws or more.

    Args:
        samples: Independent draws ``(n, *shape)``.
        expected: ``(*shape)``.
        false_alarm: Probability of failing although the mean is right, to first order.
    """
    samples = samples.detach().double().reshape(len(samples), -1)
    expected = expected.detach().double().flatten()
    count = samples.shape[0]
    assert torch.isfinite(samples).all(), "a draw is not finite"
    bound = _two_sided_bound(false_alarm / expected.numel())
    centred = samples - samples.mean(0)
    deviation = samples.std(0)
    skewness = centred.pow(3).mean(0).abs() / deviation.clamp_min(1e-100).pow(3)
    _assert_below(
        "mean",
        samples.mean(0) - expected,
        deviation / count**0.5,
        bound
        + (bound**3 + bound) / (4 * (count - 1))
        + skewness * (2 * bound**2 + 1) / (6 * count**0.5),
    )


def _two_sided_bound(probability):
    """Return z with ``P(|N(0, 1)| > z) = probability``."""
    return -torch.special.ndtri(torch.tensor(probability / 2, dtype=torch.float64)).item()


def _assert_below(what, error, deviation, bound):
    """Assert ``|error| <= bound * deviation`` everywhere, with room for rounding."""
    excess = error.abs() - bound * deviation - 1e-6 * deviation.max() - 1e-12
    worst = excess.argmax().item()
    assert excess.flatten()[worst] <= 0, (
        f"the {what} is off: entry {worst} of the flattened {tuple(error.shape)} by "
        f"{error.flatten()[worst]:.3g}, which is "
        f"{(error / deviation).flatten()[worst]:.1f} standard deviations where "
        f"{bound.flatten()[worst]:.1f} are allowed"
    )
