"""Reading a call of ``F.linear`` or a convolution as a linear map of its weight."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.linear_maps import ConvolutionMap, DenseMap, LinearMap


class Application(NamedTuple):
    """A call that applies a weight linearly: ``linear_map(x, weight, bias)``."""

    linear_map: LinearMap
    x: Any
    weight: Any
    bias: Any


def _linear(input: Any, weight: Any, bias: Any = None) -> Application | None:
    if weight.dim() != 2:  # a vector, which torch takes as a single output without a dimension
        return None
    return Application(DenseMap(), input, weight, bias)


def _convolution(function: Callable[..., Tensor]) -> Callable[..., Application]:
    def parse(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Application:
        linear_map = ConvolutionMap(
            function, tuple(weight.shape[1:]), stride, padding, dilation, groups
        )
        return Application(linear_map, input, weight, bias)

    return parse


_PARSERS: dict[Callable[..., Any], Callable[..., Application | None]] = {
    F.linear: _linear,
    F.conv1d: _convolution(F.conv1d),
    F.conv2d: _convolution(F.conv2d),
    F.conv3d: _convolution(F.conv3d),
}


def parse_application(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Application | None:
    """Read a call of ``F.linear`` or a convolution, positional or by keyword.

    Args:
        function: The function called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The application, or None if the function is not a linear map of its weight.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(5, 3), torch.ones(2, 3)
        >>> application = parse_application(F.linear, (x,), {"weight": weight})
        >>> application.linear_map(x, weight).shape
        torch.Size([5, 2])
    """
    parser = _PARSERS.get(function)
    return None if parser is None else parser(*args, **kwargs)
