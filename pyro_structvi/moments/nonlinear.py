"""Moments of a rectified normal, with gradients by hand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi._torch import inside_forward_derivative
from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.moments.random_tensor import RandomTensor

FARTHEST = 1e4  # standard deviations; a density is zero there in any precision
STEEP = 1e30


def relu(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the moments of ``max(x, 0)``.

    References:
        Frey and Hinton (1999), "Variational learning in nonlinear Gaussian belief networks", Sec. 2.2.
    """
    keeps_graph = torch.is_grad_enabled() or inside_forward_derivative()
    loc, variance, *_ = (ReluMoments.apply if keeps_graph else ReluMoments.forward)(m, v)
    return loc, variance


def normal_cdf(a: Tensor) -> Tensor:
    """Return the standard normal's distribution function, accurate far below zero too."""
    # Torch's `ndtr` goes by `erf`, and rounds tails to zero.
    return 0.5 * torch.erfc(-a / math.sqrt(2))


def normal_density(a: Tensor) -> Tensor:
    """Return the standard normal's density."""
    return torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)


def in_deviations(m: Tensor, s: Tensor) -> Tensor:
    """Return ``m / s``, with a bound where nothing depends on it, so that its square stays finite."""
    return m.clamp(-FARTHEST * s, FARTHEST * s) / s


class ReluMoments(torch.autograd.Function):
    r"""Mean and variance of ``max(x, 0)``, by one tail of the normal.

    With :math:`a = m / s`, the tail :math:`t = \Phi(-|a|)` and :math:`h = \phi(a) - |a| t`, the mean of
    what is above zero at ``-|a|``,

    .. math:: E = \max(m, 0) + s h, \qquad \operatorname{Var} = v (\Phi(a) - h (|a| + h)).

    Their derivatives are :math:`\Phi(a)` and :math:`\phi(a) / 2 s`, and :math:`2 E \Phi(-a)` and
    :math:`\Phi(a) - E \phi(a) / s`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return mean and variance, and for the derivatives the tail and the density over s."""
        s = floored_sqrt(v)
        a = (m / s).clamp(-FARTHEST, FARTHEST)
        distance = a.abs()
        tail = (distance * math.sqrt(0.5)).erfc_().mul_(0.5)
        density = (a * a).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        beyond = torch.addcmul(density, distance, tail, value=-1)
        loc = torch.addcmul(m.clamp_min(0), s, beyond)
        # Of the two sides, which meet at zero, the larger above it; `where` takes as long as `erfc`.
        above = torch.maximum(tail, torch.minimum(1 - tail, a.mul_(STEEP)))
        share = above.sub_(distance.add_(beyond).mul_(beyond)).clamp_min(0)
        return loc, share.mul_(v), tail, density.div_(s)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the inputs, the mean, and what its derivatives are made of."""
        loc, _, tail, density = output
        ctx.mark_non_differentiable(tail, density)
        ctx.save_for_backward(*inputs, loc, tail, density)
        ctx.save_for_forward(*inputs, loc, tail, density)

    @staticmethod
    def backward(ctx: Any, of_loc: Tensor, of_variance: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Return the gradients by mean and variance."""
        m, v, loc, tail, density = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            s = floored_sqrt(v)
            a = in_deviations(m, s)
            above, below = normal_cdf(a), normal_cdf(-a)
            density = normal_density(a) / s
            loc = m * above + s * s * density
        else:
            above, below = _sides(m, tail)
        density = _without_floor(v, density)
        by_mean = of_loc * above + 2 * of_variance * loc * below
        return by_mean, 0.5 * of_loc * density + of_variance * (above - loc * density)

    @staticmethod
    def jvp(ctx: Any, of_m: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the changes of mean and variance."""
        m, v, loc, tail, density = ctx.saved_tensors
        (above, below), density = _sides(m, tail), _without_floor(v, density)
        of_loc = above * of_m + 0.5 * density * of_v
        return of_loc, 2 * loc * below * of_m + (above - loc * density) * of_v, None, None


def _sides(m: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities above and below zero, by the smaller of them."""
    rest, is_above = 1 - tail, m > 0
    return torch.where(is_above, rest, tail), torch.where(is_above, tail, rest)


def _without_floor(v: Tensor, density: Tensor) -> Tensor:
    """Return what a standard deviation's change counts, which is nothing at its floor."""
    return torch.where(v < torch.finfo(v.dtype).tiny, 0, density)


NODES = 32
LARGEST_POWER = 31  # of which the nodes give mean and variance exactly
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
    function, closed = nonlinearity
    if x.covariance is None:
        by = closed or (lambda m, v: by_quadrature(function, m, v))
        return RandomTensor(*by(x.loc, x.variance), x.settings)
    scale = floored_sqrt(x.variance)
    values, weights = _values(function, x.loc, scale)  # of the coefficients, and of the moments
    found = closed(x.loc, x.variance) if closed else _averages(values, weights)
    covariance = _mehler(values, weights, scale, x.covariance, found[1])
    return RandomTensor(*found, x.settings, covariance)


def by_quadrature(function: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> Moments:
    """Return the moments of a smooth function by Gauss-Hermite quadrature with 32 nodes."""
    return _averages(*_values(function, m, floored_sqrt(v)))


def _averages(values: Tensor, weights: Tensor) -> Moments:
    loc = torch.einsum("k,k...->...", weights, values)
    return loc, torch.einsum("k,k...->...", weights, (values - loc).square())


def _values(function: Callable[[Tensor], Tensor], m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = gauss_hermite(NODES, m)
    return function(m + s * nodes.reshape(-1, *(1 for _ in m.shape))), weights


def _mehler(
    values: Tensor, weights: Tensor, scale: Tensor, covariance: Tensor, variance: Tensor
) -> Tensor:
    """Return the covariance of a function of each element of the last dimension.

    Args:
        values: The function at the nodes, ``(nodes, *shape)``.
        weights: The nodes' weights.
        scale: The standard deviations of the elements.
        covariance: Their covariance.
        variance: The function's variances.
    """
    correlation = covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    nodes, _ = gauss_hermite(NODES, scale)
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


def leaky_relu(slope: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``x`` above zero and ``slope x`` below it."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        loc, variance = relu(m, v)
        with_x = v * normal_cdf(in_deviations(m, floored_sqrt(v)))  # by Stein's lemma
        rest = 1 - slope
        total = slope**2 * v + rest**2 * variance + 2 * slope * rest * with_x
        return slope * m + rest * loc, total.clamp_min(0)

    return closed


def clamp(low: float, high: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``x`` clipped to an interval, as the difference of two hinges."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        # From the nearer end, so that no large hinges are subtracted.
        is_upper, length = m > 0.5 * (low + high), high - low
        inside = torch.where(is_upper, high - m, m - low)
        first, of_first = relu(inside, v)
        second, of_second = relu(inside - length, v)
        # Where the second is not zero, the first is larger by the length of the interval.
        together = of_second + second.square() + length * second - first * second
        loc, variance = first - second, of_first + of_second - 2 * together
        return torch.where(is_upper, high - loc, low + loc), variance.clamp_min(0)

    return closed


def at_least(low: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``max(x, low)``."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        loc, variance = relu(m - low, v)
        return low + loc, variance

    return closed


def at_most(high: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``min(x, high)``."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        loc, variance = relu(high - m, v)
        return high - loc, variance

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
    rest = -torch.expm1(-v)
    variance = 0.5 * rest * (rest + 2 * torch.cos(m).square() * torch.exp(-v))
    return torch.sin(m) * torch.exp(-0.5 * v), variance


def cos(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of ``cos x``."""
    return sin(m + math.pi / 2, v)


def elu(alpha: float) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``x`` above zero and ``alpha (e^x - 1)`` below."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        s = floored_sqrt(v)
        b = in_deviations(-m, s)
        logs = [torch.special.log_ndtr(b - k * s) for k in range(3)]
        # E[e^(k x) 1(x < 0)]
        zeroth, first, second = (torch.exp(k * (m + 0.5 * k * v) + logs[k]) for k in range(3))
        # Variances of what is below, and of the step, so that no large squares are subtracted.
        log_ratio = v + logs[2] - 2 * logs[1]
        small = first.square() * torch.expm1(log_ratio.clamp_max(1))
        own = torch.where(log_ratio < 1, small, second - first.square())
        under = own + normal_cdf(-b) * (zeroth - 2 * first)
        loc, variance = relu(m, v)
        mean = alpha * (first - zeroth)
        return loc + mean, (variance + alpha**2 * under - 2 * loc * mean).clamp_min(0)

    return closed


def scaled(
    closed: Callable[[Tensor, Tensor], Moments],
    factor: float,
    slope: float = 1.0,
    shift: float = 0.0,
) -> Callable[[Tensor, Tensor], Moments]:
    """Return the moments of ``factor f(slope x + shift)``."""

    def outer(m: Tensor, v: Tensor) -> Moments:
        loc, variance = closed(slope * m + shift, slope**2 * v)
        return factor * loc, factor**2 * variance

    return outer


SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717

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
    "hardsigmoid": lambda inplace=False: Nonlinearity(
        F.hardsigmoid, scaled(clamp(0.0, 1.0), 1.0, 1 / 6, 0.5)
    ),
    "hardswish": lambda inplace=False: Nonlinearity(F.hardswish),
    "hardtanh": lambda min_val=-1.0, max_val=1.0, inplace=False: Nonlinearity(
        lambda x: F.hardtanh(x, min_val, max_val), clamp(min_val, max_val)
    ),
    "leaky_relu": lambda negative_slope=0.01, inplace=False: Nonlinearity(
        lambda x: F.leaky_relu(x, negative_slope), leaky_relu(negative_slope)
    ),
    "log_sigmoid": lambda: Nonlinearity(F.logsigmoid),
    "mish": lambda inplace=False: Nonlinearity(F.mish),
    "pow": lambda exponent: _power(exponent),
    "relu": lambda inplace=False: Nonlinearity(torch.relu, relu),
    "relu6": lambda inplace=False: Nonlinearity(F.relu6, clamp(0.0, 6.0)),
    "selu": lambda inplace=False: Nonlinearity(F.selu, scaled(elu(SELU_ALPHA), SELU_SCALE)),
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
    lower = None if low is None or low == -math.inf else float(low)
    upper = None if high is None or high == math.inf else float(high)
    if lower is not None and upper is not None:
        return clamp(lower, upper)
    if lower is not None:
        return at_least(lower)
    return None if upper is None else at_most(upper)


def _power(exponent: Any) -> Nonlinearity:
    """Return a power, which is exact for small whole numbers, and of others has no moments."""
    if not isinstance(exponent, (int, float)) or exponent not in range(1, LARGEST_POWER + 1):
        raise NotImplementedError(
            f"A power of {exponent!r} has no moments, only one of 1 to {LARGEST_POWER}"
        )
    return Nonlinearity(lambda x: x**exponent, square if exponent == 2 else None)
