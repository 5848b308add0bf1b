"""Moments of a rectified normal, with gradients by hand."""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_forward_derivative
from pyro_structvi.linalg.precision import floored_sqrt

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
