"""Moments of functions of single elements, in closed form or by quadrature."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._torch import inside_forward_derivative
from pyro_structvi.linalg.matrices import floored_sqrt
from pyro_structvi.linalg.quadrature import gauss_hermite, gauss_legendre
from pyro_structvi.moments.random_tensor import RandomTensor

NODES = 32
LARGEST_POWER = 31  # mean and variance are exact with 32 nodes
ORDERS = 4  # Hermite polynomials; the k-th adds a correlation to the power of k over k!
LARGEST_CORRELATION = 1.001  # above 1 by rounding, which keeps its gradient
FARTHEST = 1e4  # standard deviations; a density is zero there in any precision
STEEP = 1e30
INTERVAL_NODES = 5  # inside of an interval that is shorter than a standard deviation
SERIES = 6  # terms of the exponential function near zero
# The sigmoid as a mixture of normal distribution functions; up to a variance of NARROW it has nodes.
NARROW, NARROW_NODES = 1.0, 20
STEP_WEIGHTS = (
    *(0.003246343272134, 0.051517477033972, 0.195077912673858, 0.315569823632818),
    *(0.274149576158423, 0.131076880695470, 0.027912418727972, 0.001449567805354),
)
STEP_SCALES = (
    *(1.365340806296348, 1.059523971016916, 0.830791313765644, 0.650732166639391),
    *(0.508135425366489, 0.396313345166341, 0.308904252267995, 0.238212616409306),
)
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717

Moments = tuple[Tensor, Tensor]
ClosedForm = Callable[[Tensor, Tensor], Moments]


def propagate(
    function: Callable[[Tensor], Tensor], closed: ClosedForm | None, x: RandomTensor
) -> RandomTensor:
    """Return the moments of a function of each element, by a closed form if there is one."""
    if closed is not None and x.covariance is None:
        return RandomTensor(*closed(x.loc, x.variance), x.settings)
    nodes, weights = gauss_hermite(NODES, x.loc)
    scale = floored_sqrt(x.variance)
    values = function(x.loc + scale * nodes.reshape(-1, *(1 for _ in x.shape)))
    at_nodes = averages(values, weights)
    loc, variance = at_nodes if closed is None else closed(x.loc, x.variance)
    if x.covariance is None:
        return RandomTensor(loc, variance, x.settings)
    # Mehler's formula: the Hermite coefficients c_k add corr^k c_k c_k' / k! to the covariance.
    correlation = correlations(x.covariance, x.variance)
    power, total = torch.ones_like(correlation), torch.zeros_like(correlation)
    former, polynomial = torch.ones_like(nodes), nodes
    for order in range(1, ORDERS + 1):
        c = torch.einsum("k,k...->...", weights * polynomial, values)
        power = power * correlation
        total = total + power * c.unsqueeze(-1) * c.unsqueeze(-2) / math.factorial(order)
        former, polynomial = polynomial, nodes * polynomial - order * former
    if closed is not None:  # nodes may give more variance to a function that is narrow beside them
        is_more = at_nodes[1] > variance
        shares = torch.where(is_more, variance / torch.where(is_more, at_nodes[1], 1), 1)
        total = total * floored_sqrt(shares.unsqueeze(-1) * shares.unsqueeze(-2))
    missing = variance - total.diagonal(dim1=-2, dim2=-1)
    return RandomTensor(loc, variance, x.settings, total + torch.diag_embed(missing))


def correlations(covariance: Tensor, variance: Tensor) -> Tensor:
    """Return a covariance in units of standard deviations, zero for elements without variance.

    Rounding may leave a covariance where a variance is zero, or far too small beside it.
    """
    is_constant = variance < torch.finfo(variance.dtype).tiny
    scale = floored_sqrt(torch.where(is_constant, 1, variance))
    # A product of both scales may underflow.
    found = covariance / scale.unsqueeze(-1) / scale.unsqueeze(-2)
    found = found.clamp(-LARGEST_CORRELATION, LARGEST_CORRELATION)
    return found.masked_fill(is_constant.unsqueeze(-1) | is_constant.unsqueeze(-2), 0.0)


def averages(values: Tensor, weights: Tensor) -> Moments:
    """Return mean and variance of values at nodes ``(nodes, ...)`` with weights that sum to one."""
    loc = torch.einsum("k,k...->...", weights, values)
    return loc, torch.einsum("k,k...->...", weights, (values - loc).square())


def normal_cdf(a: Tensor) -> Tensor:
    """Return the standard normal distribution function, accurate in both tails."""
    # torch.special.ndtr uses `erf`, and rounds the lower tail to zero.
    return 0.5 * torch.erfc(-a / math.sqrt(2))


def normal_density(a: Tensor) -> Tensor:
    """Return the standard normal density."""
    return torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)


def in_deviations(m: Tensor, s: Tensor) -> Tensor:
    """Return ``m / s``, clipped so that its square stays finite."""
    return m.clamp(-FARTHEST * s, FARTHEST * s) / s


# ---- closed forms --------------------------------------------------------------------------------


class ReluMoments(torch.autograd.Function):
    r"""Mean and variance of ``max(x, 0)``, by one tail of the normal.

    With :math:`a = m / s`, the tail :math:`t = \Phi(-|a|)` and :math:`h = \phi(a) - |a| t`,

    .. math:: E = \max(m, 0) + s h, \qquad \operatorname{Var} = v (\Phi(a) - h (|a| + h)).

    Their derivatives are :math:`\Phi(a)` and :math:`\phi(a) / 2 s`, and :math:`2 E \Phi(-a)` and
    :math:`\Phi(a) - E \phi(a) / s`. Automatic differentiation takes a third longer for a step.
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
        # Phi(a) is the tail below zero, and one minus the tail above; `where` is as slow as `erfc`.
        above = torch.maximum(tail, torch.minimum(1 - tail, a.mul_(STEEP)))
        share = above.sub_(distance.add_(beyond).mul_(beyond)).clamp_min(0)
        return loc, share.mul_(v), tail, density.div_(s)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        loc, _, tail, density = output
        ctx.mark_non_differentiable(tail, density)
        ctx.save_for_backward(*inputs, loc, tail, density)
        ctx.save_for_forward(*inputs, loc, tail, density)

    @staticmethod
    def backward(ctx: Any, of_loc: Tensor, of_variance: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        loc_m, loc_v, variance_m, variance_v = _derivatives(*ctx.saved_tensors)
        return of_loc * loc_m + of_variance * variance_m, of_loc * loc_v + of_variance * variance_v

    @staticmethod
    def jvp(ctx: Any, of_m: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor, None, None]:
        loc_m, loc_v, variance_m, variance_v = _derivatives(*ctx.saved_tensors)
        return loc_m * of_m + loc_v * of_v, variance_m * of_m + variance_v * of_v, None, None


def _derivatives(
    m: Tensor, v: Tensor, loc: Tensor, tail: Tensor, density: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the derivatives of mean and variance, each by ``m`` and ``v``."""
    if torch.is_grad_enabled():  # a second derivative needs the graph of what is saved
        s = floored_sqrt(v)
        a = in_deviations(m, s)
        above, below, density = normal_cdf(a), normal_cdf(-a), normal_density(a) / s
        loc = m * above + s * s * density
    else:
        larger, is_above = 1 - tail, m > 0
        above, below = torch.where(is_above, larger, tail), torch.where(is_above, tail, larger)
    density = torch.where(v < torch.finfo(v.dtype).tiny, 0, density)  # s is constant at its floor
    return above, 0.5 * density, 2 * loc * below, above - loc * density


def relu(m: Tensor, v: Tensor) -> Moments:
    """Return the moments of ``max(x, 0)``.

    References:
        Frey and Hinton (1999), "Variational learning in nonlinear Gaussian belief networks", Sec. 2.2.
    """
    keeps_graph = torch.is_grad_enabled() or inside_forward_derivative()
    loc, variance, *_ = (ReluMoments.apply if keeps_graph else ReluMoments.forward)(m, v)
    return loc, variance


def affine(
    closed: ClosedForm,
    slope: float = 1.0,
    shift: float = 0.0,
    factor: float = 1.0,
    offset: float = 0.0,
) -> ClosedForm:
    """Return the moments of ``factor f(slope x + shift) + offset``."""

    def outer(m: Tensor, v: Tensor) -> Moments:
        loc, variance = closed(slope * m + shift, slope**2 * v)
        return factor * loc + offset, factor**2 * variance

    return outer


def leaky_relu(slope: float) -> ClosedForm:
    """Return the moments of ``x`` above zero and ``slope x`` below it."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        loc, variance = relu(m, v)
        with_x = v * normal_cdf(in_deviations(m, floored_sqrt(v)))  # by Stein's lemma
        rest = 1 - slope
        total = slope**2 * v + rest**2 * variance + 2 * slope * rest * with_x
        return slope * m + rest * loc, total.clamp_min(0)

    return closed


def clamp(low: float | None = None, high: float | None = None) -> ClosedForm:
    """Return the moments of ``x`` clipped to an interval, as the difference of two hinges.

    An interval inside one standard deviation has Gauss-Legendre quadrature.
    """
    upper = math.inf if high is None else float(high)
    lower = -math.inf if low is None else min(float(low), upper)  # as torch, where ends are crossed
    if upper == math.inf:
        if lower == -math.inf:
            return lambda m, v: (m, v)
        return affine(relu, shift=-lower, offset=lower)
    if lower == -math.inf:
        return affine(relu, slope=-1.0, shift=upper, factor=-1.0, offset=upper)

    def closed(m: Tensor, v: Tensor) -> Moments:
        # From the nearer end, which avoids differences of large hinges.
        is_upper, length = m > 0.5 * (lower + upper), upper - lower
        inside = torch.where(is_upper, upper - m, m - lower)
        first, of_first = relu(inside, v)
        second, of_second = relu(inside - length, v)
        # If the second hinge is positive, the first is larger by the length of the interval.
        together = of_second + second.square() + length * second - first * second
        loc, variance = first - second, of_first + of_second - 2 * together
        # Hinges that are wide beside the interval cancel; the density varies little inside.
        is_wide, s = v > length**2, floored_sqrt(v).clamp_min(length)
        part, weights = (
            torch.as_tensor(each).to(inside).reshape(-1, *(1 for _ in m.shape))
            for each in gauss_legendre(INTERVAL_NODES)
        )
        shares = weights * length / s * normal_density(in_deviations(length * part - inside, s))
        beyond = normal_cdf(in_deviations(inside - length, s))
        wide = length * (beyond + (part * shares).sum(0))
        of_wide = length**2 * (beyond + (part.square() * shares).sum(0)) - wide.square()
        loc = torch.where(is_wide, wide, loc)
        variance = torch.where(is_wide, of_wide, variance).clamp_min(0)
        return torch.where(is_upper, upper - loc, lower + loc), variance

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


def elu(alpha: float) -> ClosedForm:
    """Return the moments of ``x`` above zero and ``alpha (e^x - 1)`` below."""

    def closed(m: Tensor, v: Tensor) -> Moments:
        s = floored_sqrt(v)
        b = in_deviations(-m, s)
        # The gradient of torch's function overflows far below, where none is used.
        logs = [torch.special.log_ndtr((b - k * s).clamp_min(-FARTHEST)) for k in (1, 2)]
        zeroth = normal_cdf(b)

        def tail(k: int) -> Tensor:
            """Return ``E[exp(k x) 1(x < 0)]``."""
            scaled = torch.special.erfcx((k * s - b).clamp_min(0) / math.sqrt(2)) / 2
            near = k * (m + 0.5 * k * v) + logs[k - 1]
            return torch.where(b < k * s, scaled.log() - b * b / 2, near).exp()

        first, second = tail(1), tail(2)
        # The variance below zero, without differences of large squares.
        log_ratio = torch.where(b > s, v + logs[1] - 2 * logs[0], 1)
        small = first.square() * torch.expm1(log_ratio.clamp_max(1))
        own = torch.where(log_ratio < 1, small, second - first.square())
        under = own + normal_cdf(-b) * (zeroth - 2 * first)
        loc, variance = relu(m, v)
        mean = alpha * (first - zeroth)
        variance = variance + alpha**2 * under - 2 * loc * mean
        # Near zero probabilities of narrow inputs cancel: a leaky ReLU, and a series for the remainder.
        is_near = (v < math.sqrt(torch.finfo(v.dtype).eps)) & (b < 10)
        s, b = torch.where(is_near, s, 0), torch.where(is_near, b, 0)
        powers = [normal_cdf(b), -b * normal_cdf(b) - normal_density(b)]  # E[z^k 1(x < 0)], x = s z
        for k in range(2, 2 * SERIES + 1):
            powers.append(-b * powers[-1] + (k - 1) * powers[-2])
        averages_of = [s**k * power for k, power in enumerate(powers)]
        rest = np.array([0, 0, *(alpha / math.factorial(k) for k in range(2, SERIES + 1))])
        of_rest, product, square = (  # polynomials in x
            sum(
                (own * averages_of[k] for k, own in enumerate(each.tolist()) if own),
                torch.zeros_like(m),
            )
            for each in (rest, np.convolve([0, alpha], rest), np.convolve(rest, rest))
        )
        line, of_line = leaky_relu(alpha)(m, v)
        own = square - of_rest.square() + 2 * (product - line * of_rest)
        loc = torch.where(is_near, line + of_rest, loc + mean)
        variance = torch.where(is_near, of_line + own, variance)
        return loc, variance.clamp_min(0)

    return closed


def rise(function: Callable[[Tensor], Tensor], low: float) -> ClosedForm:
    r"""Return the moments of ``tanh x``, from ``low = -1`` to 1, or of ``sigmoid x``, from 0.

    Quadrature misses a rise that is much narrower than the distribution of x. There the sigmoid is
    :math:`\sum_k w_k \Phi(s_k x)`, up to 2e-9; its square is the sigmoid minus its derivative.

    References:
        Monahan and Stefanski (1992), "Normal scale mixture approximations to F*(z) and computation of
        the logistic-normal integral", in Balakrishnan, "Handbook of the logistic distribution".
    """
    height = 1 - low  # also the factor of x in the sigmoid
    constants = (
        [height / 2 * weight for weight in STEP_WEIGHTS],
        [height * scale / math.sqrt(2) for scale in STEP_SCALES],
    )

    def closed(m: Tensor, v: Tensor) -> Moments:
        ones = [1 for _ in m.shape]
        nodes, own = gauss_hermite(NARROW_NODES, m)
        narrow = averages(function(m + floored_sqrt(v) * nodes.reshape(-1, *ones)), own)
        weights, scales = m.new_tensor(constants).reshape(2, -1, *ones)
        widths = scales * (1 + 2 * scales.square() * v).rsqrt()
        z, is_upper = widths * m, m > 0
        distance = torch.where(is_upper, z, -z)  # the magnitude has no derivative at zero
        rest = (weights * torch.erfc(distance)).sum(0)  # to the nearer end
        derivative = (weights * widths * torch.exp(-z * z)).sum(0) * (2 / math.sqrt(math.pi))
        loc = torch.where(is_upper, 1 - rest, low + rest)
        variance = (rest * (height - rest) - derivative).clamp_min(0)
        is_wide = v > NARROW / height**2
        return torch.where(is_wide, loc, narrow[0]), torch.where(is_wide, variance, narrow[1])

    return closed


def _power(exponent: Any) -> ClosedForm | None:
    """Check an exponent; quadrature is exact for small whole numbers."""
    if not isinstance(exponent, (int, float)) or exponent not in range(1, LARGEST_POWER + 1):
        raise NotImplementedError(
            f"A power of {exponent!r} has no moments, only one of 1 to {LARGEST_POWER}"
        )
    return square if exponent == 2 else None


SMOOTH = ("erf", "gelu", "hardswish", "log_sigmoid", "mish", "silu", "softplus", "softsign")
# By torch's names: from the arguments after the input to the closed form; None for quadrature.
NONLINEARITIES: dict[str, Callable[..., ClosedForm | None] | None] = {
    **dict.fromkeys(SMOOTH),
    "abs": lambda: leaky_relu(-1.0),
    "clamp": lambda min=None, max=None: clamp(min, max),
    "cos": lambda: affine(sin, shift=math.pi / 2),
    "elu": lambda alpha=1.0, inplace=False: elu(alpha),
    "exp": lambda: exp,
    "hardsigmoid": lambda inplace=False: affine(clamp(0.0, 1.0), slope=1 / 6, shift=0.5),
    "hardtanh": lambda min_val=-1.0, max_val=1.0, inplace=False: clamp(min_val, max_val),
    "leaky_relu": lambda negative_slope=0.01, inplace=False: leaky_relu(negative_slope),
    "pow": _power,
    "relu": lambda inplace=False: relu,
    "relu6": lambda inplace=False: clamp(0.0, 6.0),
    "selu": lambda inplace=False: affine(elu(SELU_ALPHA), factor=SELU_SCALE),
    "sigmoid": lambda: rise(torch.sigmoid, 0.0),
    "sin": lambda: sin,
    "square": lambda: square,
    "tanh": lambda: rise(torch.tanh, -1.0),
}
