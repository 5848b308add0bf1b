"""Quadrature under normals, and bisection."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor


@cache
def _hermite(count: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / math.sqrt(2 * math.pi)


def gauss_hermite(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights under a standard normal, exact for degree ``2 count - 1``."""
    nodes, weights = (torch.as_tensor(part).to(like) for part in _hermite(count))
    return nodes, weights


@cache
def _sobol(count: int, size: int) -> Tensor:
    uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(
        count // 2, dtype=torch.float64
    )
    half = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    half = half / half.square().mean(0).sqrt()  # so that second moments are exact
    return torch.cat([half, -half])


def normal_points(count: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return points ``(count, size)`` for averages under independent standard normals, and weights.

    Scrambled Sobol points (Owen, 1998) and their negatives; variances and odd moments are exact.
    """
    points = _sobol(count, size).to(like)
    return points, points.new_full((count,), 1 / count)


HALVINGS = 60  # exhausts double precision


def bisect(is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the root between ``low`` and ``high``, elementwise."""
    for _ in range(HALVINGS):
        middle = low + (high - low) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
