"""The table from a function of torch to its moments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_structvi.maps.calls import (
    Application,
    FactorApplication,
    Lookup,
    parse_application,
    rewritten,
)
from pyro_structvi.moments.layers import LAYER_RULES
from pyro_structvi.moments.linear import linear_moments, lookup_moments
from pyro_structvi.moments.nonlinear import NONLINEARITIES, propagate
from pyro_structvi.moments.random_tensor import RandomTensor, random_among
from pyro_structvi.moments.rearranging import REARRANGING_RULES

# By torch's names and with torch's arguments; one name serves functions, methods and operators.
RULES: dict[str, Callable[..., Any]] = {**REARRANGING_RULES, **LAYER_RULES}


def moments_of_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the moments of the result of a function of torch."""
    outputs = rewritten(function, args, kwargs)
    if outputs is not None:
        return outputs
    reading = parse_application(function, args, kwargs)
    if isinstance(reading, Application):
        return linear_moments(reading)
    if isinstance(reading, Lookup):
        return lookup_moments(reading)
    if isinstance(reading, FactorApplication):
        return reading.function(reading.x, reading.weight)
    name = name_of(function)
    found = _apply(name.removesuffix("_"), function, args, kwargs)
    if not name.endswith("_") and not kwargs.get("inplace", False):
        return found
    if not isinstance(args[0], RandomTensor):
        raise NotImplementedError(f"`{name}` would make a known tensor random in place")
    return args[0].become(found)


def name_of(function: Callable[..., Any]) -> str:
    """Return torch's name of a function, method, operator or property; in-place ones end in ``_``."""
    name: str = getattr(function, "__name__", repr(function))
    if name == "__get__":
        return str(getattr(function, "__self__").__name__)  # noqa: B009
    if name.startswith("__i") and name.endswith("__") and name != "__invert__":
        return f"{name[3:-2]}_"
    return name.strip("_") if name.startswith("__") else name


def _apply(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if name in RULES:
        return RULES[name](*args, **kwargs)
    x = args[0] if args else None
    if name in NONLINEARITIES and isinstance(x, RandomTensor):
        read = NONLINEARITIES[name]
        closed = None if read is None else read(*args[1:], **kwargs)
        return propagate(lambda values: function(values, *args[1:], **kwargs), closed, x)
    if next(random_among((args, kwargs))).settings.linearize:
        return linearized(function, args, kwargs)
    raise NotImplementedError(
        f"The function `{name}` has no rule for the moments of a random input"
    )


def linearized(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RandomTensor:
    """Return the moments of a function's tangent at the mean, ``J S J'`` with its Jacobian J.

    The first argument must be the only random one, with independent examples first. The cost is one
    backward pass for each element of an example's result.
    """
    x = args[0] if args else None
    if not isinstance(x, RandomTensor) or len([*random_among((args, kwargs))]) != 1:
        raise NotImplementedError(
            f"`linearize` takes functions of one random tensor, their first argument, but "
            f"`{name_of(function)}` has others"
        )
    loc = function(x.loc, *args[1:], **kwargs)
    if not isinstance(loc, Tensor) or not loc.is_floating_point() or loc.shape[:1] != x.shape[:1]:
        raise NotImplementedError(
            "`linearize` takes functions that return one tensor with the examples first, which "
            f"`{name_of(function)}` does not"
        )
    pull: Any = torch.func.vjp(lambda value: function(value, *args[1:], **kwargs), x.loc)[1]
    size = loc.shape[1:].numel()
    units = torch.eye(size, dtype=loc.dtype, device=loc.device).reshape(size, 1, *loc.shape[1:])
    rows = torch.func.vmap(lambda unit: pull(unit.expand_as(loc))[0], chunk_size=64)(units)
    rows = rows.flatten(2)
    if x.settings.full_covariance and x.dim() == loc.dim() == 2:
        own = torch.diag_embed(x.variance) if x.covariance is None else x.covariance
        covariance = torch.einsum("ibk,bkl,jbl->bij", rows, own, rows)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return RandomTensor(loc, variance, x.settings, covariance)
    variance = torch.einsum("ibk,bk->bi", rows.square(), x.variance.flatten(1))
    return RandomTensor(loc, variance.reshape(loc.shape), x.settings)


RandomTensor.moments_of_call = staticmethod(moments_of_call)
