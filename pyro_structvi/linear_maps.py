"""Linear layers and convolutions as one map: a matrix applied to patches of the input.

A weight ``(out, *rest)`` is seen as the matrix ``(out, in)`` with ``in = prod(rest)``. A dense layer
applies it to the last dimension of its input. A convolution applies it to every patch, that is, at
every *position*. A structured posterior needs three operations only: the map itself, the same map
with another bank of filters, and a recombination of channels that leaves positions alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DenseMap:
    """The map of :func:`torch.nn.functional.linear`; the output's channels are its last dimension.

    Matrices may carry batch dimensions in front; they then broadcast against those of the input.
    """

    @property
    def channel_dim(self) -> int:
        """The output dimension that holds the ``out`` channels, counted from the right."""
        return -1

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply ``matrix (*b, out, in)`` to ``x (*batch, in)``, giving ``(*batch, out)``."""
        if matrix.dim() == 2:
            return F.linear(x, matrix, bias)
        image = (matrix @ x.unsqueeze(-1)).squeeze(-1)
        return image if bias is None else image + bias

    def bank(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Apply a bank of filters ``(M, in)`` in place of the weight, giving ``M`` channels."""
        return self(x, matrix)

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine the channels of a bank's output by ``matrix (out, M)``."""
        return self(hidden, matrix, bias)

    def has_positions(self, x: Tensor) -> bool:
        """Whether the weight meets one example more than once."""
        return x.dim() > 2


@dataclass(frozen=True)
class ConvolutionMap:
    """The map of a convolution in one to three dimensions, for any stride, padding and dilation.

    Attributes:
        function: ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``.
        kernel_shape: ``(c_in / groups, *kernel)``, the trailing dimensions of the weight.
        stride: As in ``function``.
        padding: As in ``function``.
        dilation: As in ``function``.
        groups: As in ``function``. Each group sees its own channels with its own rows of the matrix.
    """

    function: Callable[..., Tensor]
    kernel_shape: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    @property
    def channel_dim(self) -> int:
        """The output dimension that holds the ``out`` channels, counted from the right."""
        return -len(self.kernel_shape)

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve ``x (batch, c_in, *space)`` with ``matrix (out, in)`` seen as filters."""
        filters = matrix.reshape(-1, *self.kernel_shape)
        return self.function(
            x, filters, bias, self.stride, self.padding, self.dilation, self.groups
        )

    def bank(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Apply a bank of filters ``(M, in)`` to every group, giving ``groups * M`` channels."""
        return self(x, matrix.repeat(self.groups, 1))

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine the channels of a bank's output by ``matrix (out, M)``, group by group."""
        pointwise = matrix.reshape(*matrix.shape, *(1 for _ in self.kernel_shape[1:]))
        return self.function(hidden, pointwise, bias, groups=self.groups)

    def has_positions(self, x: Tensor) -> bool:
        """Whether the weight meets one example more than once."""
        return True


LinearMap = DenseMap | ConvolutionMap


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
