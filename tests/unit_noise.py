"""Exact tests of draws that are linear in their noise, and of values that are quadratic in theirs.

A draw ``mean + A e`` of standard normal ``e`` has the covariance ``A A'``. A value ``v(e) = c + b'e +
e'Qe``, such as the ELBO of a linear model, has the mean ``c + trace(Q)``, with the diagonal ``Q_ii =
(v(e_i) + v(-e_i)) / 2 - c`` from units ``e_i``: two evaluations for each number, no error of sampling.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_structvi.testing.noise import UnitDraws, draw_with_noise, unit_draws

__all__ = [
    *("UnitDraws", "assert_close", "assert_draws", "close", "draw_with_noise", "exact_mean"),
    "unit_draws",
]


def assert_draws(draw: Callable[[], Tensor], mean: Tensor, covariance: Tensor) -> UnitDraws:
    """Assert that a draw has a mean and a covariance, to 1e-10 of the largest entry.

    Args:
        draw: Makes one draw, of shape ``(*batch, *event)``.
        mean: Broadcasts to the draw.
        covariance: ``(*batch, E, E)`` for E elements of an event; the entries of a batch are
            independent of each other, which is tested too.
    """
    found = unit_draws(draw)
    blocks = covariance.reshape(-1, *covariance.shape[-2:])
    assert_close(found.mean, mean.expand(found.mean.shape))
    assert_close(found.covariance, torch.block_diag(*blocks))
    return found


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare to 1e-10 of the largest entry, or of one where all are smaller."""
    assert actual.dtype == torch.float64
    atol = 1e-10 * max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol, check_stride=False)


def close(actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    """Compare elements to 1e-9 of each, or 1e-10."""
    tolerance = {"rtol": 1e-9, "atol": 1e-10} | tolerance
    torch.testing.assert_close(actual, expected, check_stride=False, **tolerance)


def exact_mean(value):
    """Return the mean of a value that is quadratic in its noise, and fail if it is not.

    Args:
        value: Makes one draw of it, a tensor. Of a loss, or of gradients of a loss.
    """
    center, size = draw_with_noise(value, None)

    def at(noise):
        return draw_with_noise(value, noise)[0].detach()

    _assert_quadratic(at, center.detach(), size)
    units = torch.eye(size, dtype=torch.float64)
    curvatures = [(at(unit) + at(-unit)) / 2 - center.detach() for unit in units]
    return center.detach() + sum(curvatures)


def _assert_quadratic(at, center, size):
    """Assert that the third difference along some direction is zero."""
    direction = torch.linspace(-0.9, 1.1, size, dtype=torch.float64)
    once, twice, back = at(direction), at(2 * direction), at(-direction)
    difference, largest = twice - 3 * once + 3 * center - back, twice.abs().max().item()
    assert difference.abs().max() <= 1e-9 * max(1.0, largest), "it is not quadratic in its noise"
