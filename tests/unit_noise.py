"""Exact tests of draws that are linear in their noise: ``mean + A e`` with standard normal ``e``."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_structvi.testing.noise import UnitDraws, draw_with_noise, unit_draws

__all__ = ["UnitDraws", "assert_close", "assert_draws", "close", "draw_with_noise", "unit_draws"]


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
