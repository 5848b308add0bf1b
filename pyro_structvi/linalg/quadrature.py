"""Quadrature, and roots."""

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
def gauss_legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of an integral from 0 to 1, exact for degree ``2 count - 1``."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (1 + nodes) / 2, weights / 2


def gauss_jacobi(count: int, exponent: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return nodes and weights of :math:`\int_0^1 v^a f(v) dv`, ``(*exponents, count)``.

    Each exponent a is above -1. Exact for degree ``2 count - 1``: eigenvalues of a tridiagonal matrix
    (Golub and Welsch, 1969). Differentiable with respect to the exponents.
    """
    a = exponent.unsqueeze(-1)
    n = torch.arange(1, count).to(a)
    diagonal = torch.cat([a / (a + 2), a * a / ((2 * n + a) * (2 * n + a + 2))], -1)
    beside = 2 * n * (n + a) / ((2 * n + a) * ((2 * n + a + 1) * (2 * n + a - 1)).sqrt())
    lower = torch.diag_embed(beside, -1)
    # Gradients of both triangles: `eigh` reads one of them.
    nodes, vectors = torch.linalg.eigh(torch.diag_embed(diagonal) + lower + lower.mT)
    return (1 + nodes) / 2, vectors[..., 0, :].square() / (a + 1)


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


MOST_STEPS = 100  # bisection alone takes some 60 in double precision


@torch.no_grad()
def find_root(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the root between ``low`` and ``high`` of an increasing function of unit range, elementwise.

    It has no gradient. Steps are of inverse quadratic interpolation where it is safe, else of bisection.

    References:
        Chandrupatla (1997), "A new hybrid quadratic/bisection algorithm for finding the zero of a
        nonlinear function without using derivatives", Advances in Engineering Software 28.
    """
    finfo = torch.finfo(low.dtype)
    a, b = low, high  # the latest point, and the nearest on the other side of the root
    at_a, at_b = function(a), function(b)
    is_below = torch.ones_like(low, dtype=torch.bool)  # a, of the root
    fraction = torch.full_like(low, 0.5)
    for _ in range(MOST_STEPS):
        new = a + fraction * (b - a)
        at_new = function(new)
        is_beyond = (at_new < 0) == is_below  # on the side of a
        c, at_c = torch.where(is_beyond, a, b), torch.where(is_beyond, at_a, at_b)
        b, at_b = torch.where(is_beyond, b, a), torch.where(is_beyond, at_b, at_a)
        a, at_a, is_below = new, at_new, at_new < 0
        closest = torch.where(at_a.abs() < at_b.abs(), a, b)
        margin = (2 * finfo.eps * closest.abs() + finfo.tiny) / (b - a).abs()
        is_zero = torch.minimum(at_a.abs(), at_b.abs()) <= 2 * finfo.eps
        if bool((is_zero | (margin >= 0.5)).all()):
            break
        x, y = (a - b) / (c - b), (at_a - at_b) / (at_c - at_b)
        is_safe = (y.square() < x) & ((1 - y).square() < 1 - x)
        interpolated = at_a / (at_b - at_a) * at_c / (at_b - at_c)
        interpolated += (c - a) / (b - a) * at_a / (at_c - at_a) * at_b / (at_c - at_b)
        least = margin.clamp_max(0.5)
        fraction = torch.where(is_safe, interpolated, 0.5).clamp(least, 1 - least)
    return torch.where(at_a.abs() < at_b.abs(), a, b)
