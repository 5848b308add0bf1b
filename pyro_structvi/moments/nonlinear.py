r"""Moments of functions of one normal variable: closed forms, and quadrature for the others.

For a function f of :math:`x \sim N(m, v)` there are the mean, the variance, and, where the covariance
between units is kept, the coefficients :math:`c_k = E[f(m + s z) He_k(z)]` of Hermite's polynomials, by
which (Mehler's formula)

.. math:: \operatorname{Cov}(f(x_i), f(x_j)) = \sum_{k \ge 1} c_{ik} c_{jk} \rho_{ij}^k / k!
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.moments.random_tensor import RandomTensor

NODES = 32
ORDERS = 4  # of Hermite's polynomials; the k-th adds a correlation to the power of k over k!

Moments = tuple[Tensor, Tensor]


class Nonlinearity(NamedTuple):
    """A function of each element.

    Attributes:
        function: The function.
        closed: From mean and variance to those of the function; None for quadrature.
    """

    function: Callable[[Tensor], Tensor]
    closed: Callable[[Tensor, Tensor], Moments] | None = None


def propagate(nonlinearity: Nonlinearity, x: RandomTensor) -> RandomTensor:
    """Return the moments of a function of each element."""
    closed = nonlinearity.closed or (lambda m, v: by_quadrature(nonlinearity.function, m, v))
    loc, variance = closed(x.loc, x.variance)
    if x.covariance is None:
        return RandomTensor(loc, variance, x.settings)
    covariance = _mehler(nonlinearity.function, x, variance)
    return RandomTensor(loc, variance, x.settings, covariance)


def by_quadrature(function: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> Moments:
    """Return the moments of a smooth function by Gauss-Hermite quadrature with 32 nodes."""
    values, weights = _values(function, m, floored_sqrt(v))
    loc = torch.einsum("k,k...->...", weights, values)
    return loc, torch.einsum("k,k...->...", weights, (values - loc).square())


def _values(function: Callable[[Tensor], Tensor], m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = gauss_hermite(NODES, m)
    return function(m + s * nodes.reshape(-1, *(1 for _ in m.shape))), weights


def _mehler(function: Callable[[Tensor], Tensor], x: RandomTensor, variance: Tensor) -> Tensor:
    """Return the covariance of a function of each element of the last dimension."""
    assert x.covariance is not None
    scale = floored_sqrt(x.variance)
    correlation = x.covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    values, weights = _values(function, x.loc, scale)
    nodes, _ = gauss_hermite(NODES, x.loc)
    power, total = torch.ones_like(correlation), torch.zeros_like(correlation)
    for order, polynomial in enumerate(_hermite_polynomials(nodes), 1):
        c = torch.einsum("k,k...->...", weights * polynomial, values)
        power = power * correlation
        total = total + power * c.unsqueeze(-1) * c.unsqueeze(-2) / math.factorial(order)
    missing = variance - total.diagonal(dim1=-2, dim2=-1)
    return total + torch.diag_embed(missing)


def _hermite_polynomials(z: Tensor) -> list[Tensor]:
    """Return the probabilists' polynomials of degree 1 to ORDERS."""
    found = [torch.ones_like(z), z]
    for degree in range(1, ORDERS):
        found.append(z * found[-1] - degree * found[-2])
    return found[1:]


# ---- closed forms ------------------------------------------------------------------------------------


def _density(a: Tensor) -> Tensor:
    return torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)


def relu(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of ``max(x, 0)``.

    References:
        Frey and Hinton (1999), "Variational learning in nonlinear Gaussian belief networks", Sec. 2.2.
    """
    s = floored_sqrt(v)
    a = m / s
    below, above, density = torch.special.ndtr(-a), torch.special.ndtr(a), _density(a)
    loc = s * (a * above + density)
    # Sums of what is small where the variance is: a difference of squares would lose it.
    share = above + a.square() * above * below + a * density * (below - above) - density.square()
    return loc, v * share.clamp_min(0)


def leaky_relu(slope: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``x`` above zero and ``slope x`` below it."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        loc, variance = relu(m, v)
        with_x = v * torch.special.ndtr(m / floored_sqrt(v))  # by Stein's lemma
        rest = 1 - slope
        total = slope**2 * v + rest**2 * variance + 2 * slope * rest * with_x
        return slope * m + rest * loc, total.clamp_min(0)

    return closed


def clamp(low: float, high: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``x`` clipped to an interval, as the difference of two hinges."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        first, of_first = relu(m - low, v)
        second, of_second = relu(m - high, v)
        # Where the second is not zero, the first is larger by the length of the interval.
        together = of_second + second.square() + (high - low) * second - first * second
        return low + first - second, (of_first + of_second - 2 * together).clamp_min(0)

    return closed


def exp(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of a log-normal variable."""
    loc = torch.exp(m + 0.5 * v)
    return loc, loc.square() * torch.expm1(v)


def square(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of ``x^2``."""
    return m.square() + v, 2 * v * (v + 2 * m.square())


def sin(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of ``sin x``, by the characteristic function."""
    loc = torch.sin(m) * torch.exp(-0.5 * v)
    return loc, (0.5 * (1 - torch.exp(-2 * v) * torch.cos(2 * m)) - loc.square()).clamp_min(0)


def cos(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of ``cos x``."""
    return sin(m + math.pi / 2, v)


def elu(alpha: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``x`` above zero and ``alpha (e^x - 1)`` below."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        s = floored_sqrt(v)

        def below(k: int) -> Tensor:  # E[e^(k x) 1(x < 0)]
            return torch.exp(k * m + 0.5 * k**2 * v + torch.special.log_ndtr(-(m + k * v) / s))

        zeroth, first, second = below(0), below(1), below(2)
        loc, variance = relu(m, v)
        under = alpha * (first - zeroth)
        squares = variance + loc.square() + alpha**2 * (second - 2 * first + zeroth)
        mean = loc + under
        return mean, (squares - mean.square()).clamp_min(0)

    return closed


# By torch's names: from the arguments beside the input to the function.
NONLINEARITIES: dict[str, Callable[..., Nonlinearity]] = {
    "abs": lambda: Nonlinearity(torch.abs, leaky_relu(-1.0)),
    "clamp": lambda min=-math.inf, max=math.inf: Nonlinearity(
        lambda x: x.clamp(min, max), _clamp_of(min, max)
    ),
    "cos": lambda: Nonlinearity(torch.cos, cos),
    "elu": lambda alpha=1.0, inplace=False: Nonlinearity(lambda x: F.elu(x, alpha), elu(alpha)),
    "erf": lambda: Nonlinearity(torch.erf),
    "exp": lambda: Nonlinearity(torch.exp, exp),
    "gelu": lambda approximate="none": Nonlinearity(lambda x: F.gelu(x, approximate=approximate)),
    "hardsigmoid": lambda inplace=False: Nonlinearity(F.hardsigmoid),
    "hardswish": lambda inplace=False: Nonlinearity(F.hardswish),
    "hardtanh": lambda min_val=-1.0, max_val=1.0, inplace=False: Nonlinearity(
        lambda x: F.hardtanh(x, min_val, max_val), clamp(min_val, max_val)
    ),
    "leaky_relu": lambda negative_slope=0.01, inplace=False: Nonlinearity(
        lambda x: F.leaky_relu(x, negative_slope), leaky_relu(negative_slope)
    ),
    "logsigmoid": lambda: Nonlinearity(F.logsigmoid),
    "mish": lambda inplace=False: Nonlinearity(F.mish),
    "pow": lambda exponent: Nonlinearity(lambda x: x**exponent, square if exponent == 2 else None),
    "relu": lambda inplace=False: Nonlinearity(torch.relu, relu),
    "relu6": lambda inplace=False: Nonlinearity(F.relu6, clamp(0.0, 6.0)),
    "selu": lambda inplace=False: Nonlinearity(F.selu),
    "sigmoid": lambda: Nonlinearity(torch.sigmoid),
    "silu": lambda inplace=False: Nonlinearity(F.silu),
    "sin": lambda: Nonlinearity(torch.sin, sin),
    "softplus": lambda beta=1.0, threshold=20.0: Nonlinearity(
        lambda x: F.softplus(x, beta, threshold)
    ),
    "softsign": lambda: Nonlinearity(F.softsign),
    "square": lambda: Nonlinearity(torch.square, square),
    "tanh": lambda: Nonlinearity(torch.tanh),
}


def _clamp_of(low: Any, high: Any) -> Callable[[Tensor, Tensor], Moments] | None:
    """Return the rule of a clamp of which one side, or both, may be missing."""
    if low in (None, -math.inf) or high in (None, math.inf):
        return None
    return clamp(float(low), float(high))
