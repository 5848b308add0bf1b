"""Quantiles of mixtures of distributions."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import StudentT

from pyro_structvi.linalg.matrices import shrink
from pyro_structvi.linalg.quadrature import find_root, gauss_jacobi
from pyro_structvi.weights.torch_distributions import (
    base_of,
    dtype_of_levels,
    map_tensors,
    skip_validation,
)

Function = Callable[[Tensor], Tensor]

VALUES_AT_A_TIME = 200_000  # of levels, draws and rows, in a search
NUM_DRAWS = 2000  # observations, if a distribution has no inverse distribution function
LARGEST_RATIO = 1e18  # whose square is finite in single precision
MOST_DF = 200  # degrees of freedom: half as many terms, or a quadrature
NODES = 16  # of the quadrature, with a relative error below 1e-8 up to so many degrees of freedom


def mixture_quantile(likelihood: Any, q: Tensor) -> Tensor:
    """Return quantiles ``(Q, N, *event)`` of the mixture, as roots or from samples."""
    like = base_of(likelihood).mean
    dtype = dtype_of_levels(q, like)
    # A copy without checks, since values between draws may be outside of the support at one of them.
    base = map_tensors(base_of(likelihood), lambda tensor: tensor.to(dtype).view_as(tensor))
    skip_validation(base)
    levels = q.to(base.mean).reshape(-1, *[1] * (len(base.batch_shape) + len(base.event_shape)))
    # More values than caches hold take longer, and memory.
    size = max(1, VALUES_AT_A_TIME // max(1, base.mean.numel()))
    try:
        functions = _functions_of(base)
        return torch.cat([_roots(base, *functions, own) for own in levels.split(size)]).to(like)
    except NotImplementedError:
        count = -(-NUM_DRAWS // base.batch_shape[0])
        ordered: Tensor = likelihood.sample((count,)).flatten(0, 1).sort(0).values
        # Positions q (S + 1), rounded outwards: an interval of level l covers one more draw with
        # a probability of at least l.
        positions = q * (len(ordered) + 1)
        ranks = torch.where(q < 0.5, positions.floor(), positions.ceil()).long() - 1
        return ordered[ranks.clamp(0, len(ordered) - 1).to(ordered.device)]


def _roots(base: Any, cdf: Function, icdf: Function, levels: Tensor) -> Tensor:
    """Return the quantiles at levels ``(Q, 1, ...)``, between the least and the largest of a draw."""
    parts = icdf(levels)

    def shares(values: Tensor) -> Tensor:
        """Return the probability below a value at each draw, also outside of the draw's support."""
        return cdf(values).clamp(0, 1)

    def excess(values: Tensor) -> Tensor:
        return shares(values.unsqueeze(1)).mean(1) - levels.squeeze(1)

    found = find_root(excess, parts.amin(1), parts.amax(1))
    values = found.unsqueeze(1)
    share = shares(values)
    if not share.requires_grad:
        return found
    # The derivative of the root is that of a step of Newton's method, which is zero there.
    density = base.log_prob(values).exp()
    density = density.where((share > 0) & (share < 1), 0).mean(1).detach()
    excess_now = share.mean(1) - levels.squeeze(1)
    step: Tensor = excess_now / density.clamp_min(torch.finfo(density.dtype).tiny)
    return found - (step - step.detach())


def _functions_of(base: Any) -> tuple[Function, Function]:
    """Return the distribution function of elements and its inverse; torch has none of Student's t."""
    if not isinstance(base, StudentT):
        return base.cdf, base.icdf
    df = shrink(base.df, base.df.dim())
    if bool((df > MOST_DF).any()):
        raise NotImplementedError
    if bool((df == df.flatten()[0]).all()):  # of the model, for all draws
        df = df.flatten()[0]
    standard_cdf = student_t_cdf(df)

    def cdf(values: Tensor) -> Tensor:
        return standard_cdf((values - base.loc) / base.scale)

    def icdf(levels: Tensor) -> Tensor:
        # The tail beyond t has a probability of at most (t / sqrt(df)) ** -df.
        far = df.sqrt() * torch.minimum(levels, 1 - levels) ** (-1 / df)
        standard = find_root(lambda t: standard_cdf(t) - levels, -far, far)
        return base.loc + base.scale * standard

    return cdf, icdf


def student_t_cdf(df: Tensor) -> Function:
    r"""Return the distribution function of Student's t, of degrees of freedom that broadcast to t.

    With :math:`t = \sqrt\nu \tan\theta` it is proportional to the integral of
    :math:`\cos^{\nu - 1}` up to :math:`\theta`: for one whole number of degrees of freedom by the
    recursion of its antiderivatives, else by a Gauss-Jacobi quadrature of the tail.

    Example:
        >>> student_t_cdf(torch.tensor(1.0))(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.2500, 0.5000, 0.7500])

    References:
        Abramowitz and Stegun (1972), "Handbook of mathematical functions", 26.7.3 and 26.7.4.
    """
    if not df.dim() and not df.requires_grad and df % 1 == 0:
        return partial(_by_recursion, df=int(df))
    nodes, weights = gauss_jacobi(NODES, df - 1)
    gammas = torch.lgamma(df / 2) - torch.lgamma((df + 1) / 2)
    weights = weights * (math.pi**-0.5 * (-gammas).exp()).unsqueeze(-1)

    def cdf(t: Tensor) -> Tensor:
        tail = _student_t_tail(torch.where(t < 0, -t, t), df, nodes, weights)
        return torch.where(t < 0, tail, 1 - tail)

    return cdf


def _by_recursion(t: Tensor, df: int) -> Tensor:
    ratio = (t / math.sqrt(df)).clamp(-LARGEST_RATIO, LARGEST_RATIO)  # the tangent
    square = 1 / (1 + ratio.square())  # of the cosine
    if df % 2:
        integral, whole, first, term = ratio.atan(), math.pi, 2, ratio * square
    else:
        sine = ratio * square.sqrt()
        integral, whole, first, term = sine, 2.0, 3, sine * square
    for power in range(first, df, 2):  # the term is cos ** (power - 1) * sin
        integral = term / power + (power - 1) / power * integral
        whole *= (power - 1) / power
        term = term * square
    return 0.5 + integral / whole


def _student_t_tail(t: Tensor, df: Tensor, nodes: Tensor, weights: Tensor) -> Tensor:
    r"""Return the probability beyond t, which is not negative.

    With the angle :math:`u = \pi / 2 - \theta` the integral is that of :math:`\sin^{\nu - 1}` up to u,
    :math:`u^\nu \int_0^1 v^{\nu - 1} (\sin(u v) / (u v))^{\nu - 1} dv`.
    """
    angle = torch.atan2(df.sqrt().expand_as(t), t)
    total = torch.zeros_like(angle)
    for node, weight in zip(nodes.unbind(-1), weights.unbind(-1), strict=True):
        total = total + weight * torch.sinc(angle * (node / math.pi)) ** (df - 1)
    return angle**df * total
