"""Functions of the same elements, as in ``x * x.sigmoid()``, whose dependence is kept."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_structvi.moments.nonlinear import NONLINEARITIES, propagate
from pyro_structvi.moments.random_tensor import ElementFunction, RandomTensor

LONGEST = 64  # functions in a chain, which are all evaluated again in each product

_OF_TWO = {"add", "radd", "sub", "subtract", "rsub", "mul", "rmul", "multiply"}
_OF_ONE = {
    *(*_OF_TWO, *NONLINEARITIES, "div", "truediv", "divide", "neg", "negative"),
    *("clone", "contiguous", "detach", "to", "float", "double"),
}

Call = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def with_positions(call: Call) -> Call:
    """Return the call of a sum or product with its two arguments by position."""
    name, function, args, kwargs = call
    named = [key for key in ("input", "other") if key in kwargs] if name in _OF_TWO else []
    args = (*args, *(kwargs[key] for key in named))
    return name, function, args, {key: kwargs[key] for key in kwargs if key not in named}


def moments_of_same_elements(call: Call) -> RandomTensor | None:
    """Return the moments of a sum or product of two functions of the same elements, by quadrature.

    None for a call of another function, of one tensor, or of functions of different elements.
    """
    name, _, args, _ = call
    if name not in _OF_TWO or sum(isinstance(each, RandomTensor) for each in args) < 2:
        return None
    if args[0] is args[1] or _as_function(args[0]).source is not _as_function(args[1]).source:
        return None
    composed = _composed(call)
    found = propagate(composed.function, None, RandomTensor(*composed.source))
    found.of_elements = composed
    return found


def keep_elements(call: Call, found: RandomTensor) -> None:
    """Record the function of single elements that a call computes, and its source, in its result."""
    name, _, args, kwargs = call
    if name not in _OF_ONE:
        return
    if any(isinstance(each, RandomTensor) for each in kwargs.values()):
        return
    random = [each for each in args if isinstance(each, RandomTensor)]
    loc = found.loc  # whose shape takes less time than that of a subclass
    if any(each.loc.shape != loc.shape or each.loc.dtype != loc.dtype for each in random):
        return
    if len({id(_as_function(each).source) for each in random}) == 1:
        composed = _composed(call)
        found.of_elements = composed if composed.length <= LONGEST else None


def _as_function(x: RandomTensor) -> ElementFunction:
    """Return a tensor as a function of the elements of its source, which may be itself."""
    loc = x.loc  # raises where its memory has changed
    if x.of_elements is None:
        source = loc, x.variance, x.settings, x.covariance
        x.of_elements = ElementFunction(source, Tensor.clone, 0)  # a copy, for operations in place
    return x.of_elements


def _composed(call: Call) -> ElementFunction:
    """Return the result of a call as a function of the elements of its arguments' source."""
    _, function, args, kwargs = call
    parts = [_as_function(each) if isinstance(each, RandomTensor) else each for each in args]
    inner = [each for each in parts if isinstance(each, ElementFunction)]

    def apply(values: Tensor) -> Tensor:
        given = (
            each.function(values) if isinstance(each, ElementFunction) else each for each in parts
        )
        result: Tensor = function(*given, **kwargs)
        return result

    return ElementFunction(inner[0].source, apply, 1 + max(each.length for each in inner))
