"""Exact expectations of values that are quadratic in their noise, such as the ELBO of a linear model.

A value ``v(e) = c + b'e + e'Qe`` of standard normal noise ``e`` has the mean ``c + trace(Q)``, and for
each unit ``e_i`` of noise ``Q_ii = (v(e_i) + v(-e_i)) / 2 - c``. So the mean takes two evaluations for
each number of noise, and has no error of sampling.
"""

import torch

from tests.unit_noise import draw_with_noise


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
