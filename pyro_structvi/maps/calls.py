"""Reading a call as what it does with its weight: a linear map, a look-up of rows, or a function."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pyro_structvi.maps.linear_maps import ConvolutionMap, DenseMap, LinearMap


class Application(NamedTuple):
    """A call that applies a weight linearly: ``linear_map(x, weight, bias)``."""

    linear_map: LinearMap
    x: Any
    weight: Any
    bias: Any

    @property
    def has_positions(self) -> bool:
        """Whether the weight meets one example more than once."""
        return self.linear_map.has_positions(self.x)


class Lookup(NamedTuple):
    """A call that looks up rows of a matrix, ``weight[x]`` for integers ``x (batch, *positions)``.

    Rows at ``padding_idx`` get no gradient.
    """

    x: Any
    weight: Any
    padding_idx: int | None

    @property
    def indices(self) -> Tensor:
        """The integers as ``(batch, positions)``; without a batch or positions there is one."""
        indices: Tensor = self.x.reshape(self.x.shape[:1].numel(), self.x.shape[1:].numel())
        return indices

    @property
    def has_positions(self) -> bool:
        """Whether one example looks up several rows."""
        return self.indices.shape[1] > 1

    def share_draws(self, rows: Tensor) -> Tensor:
        """Give the same draw to all positions of an example that have the same index.

        Args:
            rows: Drawn rows ``(batch, positions, dim)``, independent where an index repeats.
        """
        indices = self.indices.contiguous()
        values, order = indices.sort()
        first = order.gather(1, torch.searchsorted(values, indices))
        return rows.take_along_dim(first.unsqueeze(-1), 1)

    def shape_outputs(self, rows: Tensor) -> Tensor:
        """Return rows ``(batch, positions, dim)`` as the outputs of the call."""
        outputs = rows.reshape(*self.x.shape, rows.shape[-1])
        if self.padding_idx is None:
            return outputs
        is_padding = self.x == self.padding_idx % len(self.weight)
        return torch.where(is_padding.unsqueeze(-1), outputs.detach(), outputs)


class FactorApplication(NamedTuple):
    """A call of a function of a factor, ``function(x, weight)``, which may have examples in front."""

    function: Callable[[Tensor, Tensor], Tensor]
    x: Any
    weight: Any


def _linear(input: Any, weight: Any, bias: Any = None) -> Application | None:
    if weight.dim() != 2:  # a vector, which torch takes as a single output without a dimension
        return None
    return Application(DenseMap(), input, weight, bias)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Lookup | None:
    """Read a look-up, or None where it writes into the weight or changes what its gradient is."""
    if weight.dim() != 2 or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    return Lookup(input, weight, padding_idx)


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


_PARSERS: dict[
    Callable[..., Any], Callable[..., Application | Lookup | FactorApplication | None]
] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: _convolution(F.conv1d),
    F.conv2d: _convolution(F.conv2d),
    F.conv3d: _convolution(F.conv3d),
}


def drawn_per_example(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of inputs and a small factor one for which a lazy factor is drawn anew.

    For layers whose weight is a function of a factor: each example then has a weight of its own, at
    the price of the factor's draws, and the joint law of its outputs is exact. A decorator, for
    functions of a module. Under any other objective, or if the model uses it twice, a factor is drawn
    once, as any :class:`LazyWeight`.

    Args:
        function: Called as ``function(x, factor, ...)``. It must take a factor of its own shape,
            and one with the examples ``x.shape[:1]`` in front.

    Returns:
        The function.

    Example:
        >>> import torch
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.lazy.weight import LazyWeight, SiteUse
        >>> scale = drawn_per_example(lambda x, factor: x * factor)
        >>> q = MeanFieldNormal(torch.zeros(3), torch.tensor(1.0))
        >>> outputs = scale(torch.ones(2, 3), LazyWeight(q, SiteUse("factor", count=1)))
        >>> bool((outputs[0] == outputs[1]).any())
        False
    """

    @wraps(function)
    def overridable(x: Tensor, factor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(factor):
            outputs: Tensor = handle_torch_function(
                overridable, (factor,), x, factor, *args, **kwargs
            )
            return outputs
        return function(x, factor, *args, **kwargs)

    def parse(x: Any, factor: Any, *args: Any, **kwargs: Any) -> FactorApplication:
        return FactorApplication(lambda x, factor: function(x, factor, *args, **kwargs), x, factor)

    _PARSERS[overridable] = parse
    return overridable


def parse_application(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Application | Lookup | FactorApplication | None:
    """Read a call that applies a weight, positional or by keyword.

    Args:
        function: The function called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The application, or None if the function is none of those known.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(5, 3), torch.ones(2, 3)
        >>> application = parse_application(F.linear, (x,), {"weight": weight})
        >>> application.linear_map(x, weight).shape
        torch.Size([5, 2])
    """
    parser = _PARSERS.get(function)
    return None if parser is None else parser(*args, **kwargs)
