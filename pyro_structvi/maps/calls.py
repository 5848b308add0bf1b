"""Which calls of torch are read, and as what: one table from call to reading."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from pyro_structvi._torch import GROUPED_PRODUCT
from pyro_structvi.maps import products
from pyro_structvi.maps.arrangement import Arrangement
from pyro_structvi.maps.attention import read_attention
from pyro_structvi.maps.convolution import ConvolutionMap
from pyro_structvi.maps.dense import DenseMap
from pyro_structvi.maps.readings import Application, FactorApplication, Lookup, Reading, Rewrite
from pyro_structvi.maps.transposed_convolution import TransposedConvolutionMap


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


def _transposed_convolution(
    function: Callable[..., Tensor],
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Application | None:
    """Read a weight ``(in, out, *kernel)``, or None where groups divide it."""
    if groups != 1:
        return None
    channels, _, *kernel = weight.shape
    linear_map = TransposedConvolutionMap(
        function, (channels, *kernel), stride, padding, dilation, output_padding=output_padding
    )
    arrangement = Arrangement.transposed(tuple(weight.shape))
    return Application(linear_map, input, weight, bias, arrangement)


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
    compute = read_attention(*args, **kwargs)
    return None if compute is None else Rewrite(compute)


# From a call to how it is read; a reader takes the arguments of the call, and may return None.
_READERS: dict[Callable[..., Any], Callable[..., Reading | None]] = {
    F.linear: _linear,
    F.bilinear: products.read_bilinear,
    F.conv1d: partial(_convolution, F.conv1d),
    F.conv2d: partial(_convolution, F.conv2d),
    F.conv3d: partial(_convolution, F.conv3d),
    F.conv_transpose1d: partial(_transposed_convolution, F.conv_transpose1d),
    F.conv_transpose2d: partial(_transposed_convolution, F.conv_transpose2d),
    F.conv_transpose3d: partial(_transposed_convolution, F.conv_transpose3d),
    F.embedding: _embedding,
    GROUPED_PRODUCT: products.read_grouped_product,
    F.multi_head_attention_forward: _attention,
    torch.einsum: products.read_einsum,
    products.arranged_linear: products.read_arranged_linear,
    **dict.fromkeys((torch.addmm, Tensor.addmm), products.read_addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), products.read_baddbmm),
    **dict.fromkeys(
        (
            torch.matmul,
            Tensor.matmul,
            Tensor.__matmul__,
            torch.mm,
            Tensor.mm,
            torch.bmm,
            Tensor.bmm,
        ),
        products.read_product,
    ),
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
