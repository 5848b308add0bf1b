"""Moments of sums and products; two random terms count as independent."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_structvi.moments.nonlinear import NONLINEARITIES, propagate
from pyro_structvi.moments.random_tensor import RandomTensor, moments, settings_of


def _add(input: Any, other: Any, *, alpha: float = 1, sign: float = 1) -> RandomTensor:
    """Return the moments of ``input + sign * alpha * other``."""
    factor = sign * alpha
    if input is other:
        return _mul(input, 1 + factor)
    (a, va), (b, vb) = moments(input), moments(other)
    loc = a + factor * b
    own = None if va is None else va.expand(loc.shape)
    variance = _total(own, None if vb is None else factor**2 * vb)
    covariance = _total(
        _covariance(input, loc), _scaled(_covariance(other, loc), loc.new_tensor(factor))
    )
    return RandomTensor(loc, variance.expand(loc.shape), settings_of(input, other), covariance)


def _rsub(input: Any, other: Any) -> RandomTensor:
    return _add(other, input, sign=-1)


def _neg(input: RandomTensor) -> RandomTensor:
    return RandomTensor(-input.loc, input.variance, input.settings, input.covariance)


def _mul(input: Any, other: Any) -> RandomTensor:
    """Return the moments of a product, exact for independent factors and for a square."""
    if input is other:
        return propagate(NONLINEARITIES["square"](), input)
    (a, va), (b, vb) = moments(input), moments(other)
    loc = a * b
    terms = []
    if va is not None:
        terms.append(va * (b * b))
    if vb is not None:
        terms.append(vb * (a * a))
    if va is not None and vb is not None:
        terms.append(va * vb)
    variance = sum(terms[1:], terms[0]).expand(loc.shape)
    settings = settings_of(input, other)
    covariance = None
    if settings.full_covariance and (va is None or vb is None):
        random, factor = (input, b) if vb is None else (other, a)
        covariance = _scaled(
            _covariance(random, loc),
            loc.new_tensor(factor) if not isinstance(factor, Tensor) else factor,
        )
    return RandomTensor(loc, variance, settings, covariance)


def _div(input: Any, other: Any, *, rounding_mode: None = None) -> RandomTensor:
    if isinstance(other, RandomTensor):
        raise NotImplementedError("A division by what is random has no moments")
    return _mul(input, 1 / other)


def _lerp(input: Any, end: Any, weight: Any) -> RandomTensor:
    """Return the moments of ``input + weight * (end - input)``, exact for independent arguments."""
    (a, va), (b, vb), (w, vw) = moments(input), moments(end), moments(weight)
    loc = torch.lerp(a, b, w)
    of_weight = 0 if vw is None else vw
    variance = of_weight * (b - a).square()
    for own, share in ((va, 1 - w), (vb, w)):
        if own is not None:
            variance = variance + (share * share + of_weight) * own
    return RandomTensor(loc, variance.expand(loc.shape), settings_of(input, end, weight))


def _covariance(x: Any, loc: Tensor) -> Tensor | None:
    """Return the covariance of a term that has the shape of the sum, where it is kept."""
    if not isinstance(x, RandomTensor) or not x.settings.full_covariance or loc.dim() != 2:
        return None
    if x.covariance is None:
        return torch.diag_embed(x.variance.expand(loc.shape))
    return x.covariance.expand(*loc.shape, loc.shape[-1])


def _scaled(covariance: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return the covariance of a tensor times a known factor."""
    if covariance is None:
        return None
    if factor.dim() == 0:
        return factor.square() * covariance
    factor = factor.expand(covariance.shape[:-1])
    return covariance * factor.unsqueeze(-1) * factor.unsqueeze(-2)


def _total(first: Tensor | None, second: Tensor | None) -> Any:
    """Return the sum of what is there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _matmul(input: Any, other: Any) -> RandomTensor:
    """Return the moments of a product of matrices with independent elements."""
    (a, va), (b, vb) = moments(input), moments(other)
    loc, variance = a @ b, None
    if va is not None:
        variance = va @ (b.square() if vb is None else b.square() + vb)
    if vb is not None:
        variance = _total(variance, a.square() @ vb)
    assert variance is not None
    return RandomTensor(loc, variance, settings_of(input, other))


def _sum(
    input: RandomTensor, dim: Any = None, keepdim: bool = False, mean: bool = False, **kwargs: Any
) -> RandomTensor:
    """Return the moments of a sum or a mean over dimensions."""
    dims = tuple(range(input.dim())) if dim is None else dim
    of_terms = input.variance
    if input.covariance is not None and {-1, input.dim() - 1} & {
        *((dims,) if isinstance(dims, int) else dims)
    }:
        of_terms = input.covariance.sum((-2, -1)).unsqueeze(-1)
    loc, variance = (part.sum(dims, keepdim) for part in (input.loc, of_terms))
    if mean:
        count = math.prod(input.shape) / max(1, math.prod(loc.shape))
        loc, variance = loc / count, variance / count**2
    return RandomTensor(loc, variance, input.settings)


_PRODUCTS = ("matmul", "bmm", "mm")

RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), partial(_add, sign=-1)),
    **dict.fromkeys(("rsub",), _rsub),
    **dict.fromkeys(("mul", "rmul", "multiply"), _mul),
    **dict.fromkeys(("div", "truediv", "divide"), _div),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(_PRODUCTS, _matmul),
    "lerp": _lerp,
    "rmatmul": lambda input, other: _matmul(other, input),
    "sum": _sum,
    "mean": partial(_sum, mean=True),
}
