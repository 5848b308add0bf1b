"""Tests of samplers that say how often they raise a false alarm."""

from pyro_structvi.testing.noise import assert_mean

__all__ = ["assert_mean", "assert_moments"]


def assert_moments(samples, mean, covariance, false_alarm=1e-6):
    """Assert that independent draws ``(n, D)`` have a mean ``(D,)`` and a covariance ``(D, D)``.

    They are tests of means, of the draws and of products of their distances from the stated mean, and
    together raise an alarm with probability ``false_alarm`` although both are right.
    """
    assert_mean(samples, mean, false_alarm / 2)
    away = samples.detach().double() - mean.detach().double()
    try:
        assert_mean(away.unsqueeze(-1) * away.unsqueeze(-2), covariance, false_alarm / 2)
    except AssertionError as error:
        raise AssertionError(f"the covariance is off, as means of products: {error}") from error
