"""How a likelihood calls its net: with an input or with keywords, and what of its result it takes."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from pyro_structvi._checks import brief


def call_net(net: nn.Module, x: Any) -> Any:
    """Call a net with an input; a mapping gives keyword arguments where ``forward`` has their names.

    Args:
        net: The net.
        x: A tensor, or whatever the net takes.
    """
    return net(**x) if isinstance(x, Mapping) and _takes_keywords(net, x) else net(x)


def read_output(result: Any, output: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the tensor among what a net returns.

    Args:
        result: What the net returned: a tensor, or an object with ``logits``, such as a ``ModelOutput``.
        output: What to take of it, if neither.

    Raises:
        TypeError: If that is no tensor.
    """
    found = output(result) if output is not None else getattr(result, "logits", result)
    if isinstance(found, Tensor):
        return found
    source = "`output`" if output is not None else "The net"
    raise TypeError(
        f"{source} must return a tensor, or an object with `logits`, but got {brief(found)}. Pass "
        "`output=lambda result: ...`, which takes the tensor from what the net returns."
    )


def _takes_keywords(net: nn.Module, x: Mapping[Any, Any]) -> bool:
    parameters = inspect.signature(net.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return all(isinstance(key, str) for key in x)
    return set(x) <= set(parameters)
