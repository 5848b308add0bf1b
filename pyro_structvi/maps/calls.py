"""How a call of torch is read: as a linear map, a look-up of rows, a function, or other calls."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pyro_structvi.maps.attention import read_self_attention
from pyro_structvi.maps.convolution import ConvolutionMap
from pyro_structvi.maps.dense import DenseMap
from pyro_structvi.maps.linear_map import LinearMap


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

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        size: int = self.x.shape[: self.x.dim() - self.linear_map.event_dim(self.x)].numel()
        return size


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

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        return len(self.indices)

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

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        return len(self.x)


class Rewrite(NamedTuple):
    """A call that is replaced by ``compute()``, whose own calls meet the weights one by one."""

    compute: Callable[[], Any]


Reading = Application | Lookup | FactorApplication | Rewrite


def _linear(input: Any, weight: Any, bias: Any = None) -> Application | None:
    if weight.dim() != 2:  # a vector, which torch takes as a single output without a dimension
        return None
    return Application(DenseMap(), input, weight, bias)


def _convolution(
    function: Callable[..., Tensor],
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Application:
    kernel_shape = tuple(weight.shape[1:])
    linear_map = ConvolutionMap(function, kernel_shape, stride, padding, dilation, groups)
    return Application(linear_map, input, weight, bias)


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


def _attention(*args: Any, **kwargs: Any) -> Rewrite | None:
    compute = read_self_attention(*args, **kwargs)
    return None if compute is None else Rewrite(compute)


# From a call to how it is read; a reader takes the arguments of the call, and may return None.
_READERS: dict[Callable[..., Any], Callable[..., Reading | None]] = {
    F.linear: _linear,
    F.conv1d: partial(_convolution, F.conv1d),
    F.conv2d: partial(_convolution, F.conv2d),
    F.conv3d: partial(_convolution, F.conv3d),
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
}


def drawn_per_example(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of inputs and a small factor one for which a lazy factor is drawn anew.

    For layers whose weight is a function of a factor: each example then has a separate weight, at
    the price of the factor's draws, and the joint distribution of its outputs is exact. A decorator, for
    functions of a module. A factor that the model uses twice, or under another objective, is drawn once,
    as any :class:`~pyro_structvi.lazy.weight.LazyWeight`.

    Args:
        function: Called as ``function(x, factor, ...)``. It must take a factor of the sample site's
            shape, and one with the examples ``x.shape[:1]`` in front.

    Returns:
        The function.

    Example:
        >>> import torch
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.lazy.site_use import SiteUse
        >>> from pyro_structvi.lazy.weight import LazyWeight
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

    def read(x: Any, factor: Any, *args: Any, **kwargs: Any) -> FactorApplication:
        return FactorApplication(lambda x, factor: function(x, factor, *args, **kwargs), x, factor)

    _READERS[overridable] = read
    return overridable


def parse_application(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Reading | None:
    """Read a call that applies a weight, with arguments by position or by keyword.

    Args:
        function: The function called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What the call does with its weight, or None if that is not known.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(5, 3), torch.ones(2, 3)
        >>> application = parse_application(F.linear, (x,), {"weight": weight})
        >>> application.linear_map(x, weight).shape
        torch.Size([5, 2])
    """
    read = _READERS.get(function)
    return None if read is None else read(*args, **kwargs)
