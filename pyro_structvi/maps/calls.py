"""The functions of torch that are read as linear maps."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from pyro_structvi._torch import GROUPED_PRODUCT
from pyro_structvi.maps.convolution import ConvolutionMap, TransposedConvolutionMap
from pyro_structvi.maps.dense import DenseMap
from pyro_structvi.maps.readings import (
    Application,
    Arrangement,
    FactorApplication,
    Lookup,
    Reading,
    Rewrite,
    merged,
)


def arranged_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, arrangement: Arrangement
) -> Tensor:
    """Apply a dense layer, or a stack of them, whose weight has its dimensions in another order.

    Args:
        x: Inputs ``(*batch, *stack, in)``.
        weight: The weight.
        bias: Nothing, or a bias ``(out,)``.
        arrangement: How the weight is ``(*stack, out, in)``.

    Returns:
        Outputs ``(*batch, *stack, out)``.
    """
    tensors = (x, weight, bias)
    if has_torch_function(tensors):
        outputs: Tensor = handle_torch_function(arranged_linear, tensors, *tensors, arrangement)
        return outputs
    return DenseMap()(x, arrangement.matrices(weight), bias)


def read_arranged_linear(x: Any, weight: Any, bias: Any, arrangement: Arrangement) -> Application:
    """Read a call of :func:`arranged_linear`."""
    dense = DenseMap(positions=arrangement.stack == 0)
    return Application(dense, x, weight, bias, arrangement)


def read_bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Application:
    """Read a bilinear layer: its weight ``(out, in1, in2)`` meets the products of both inputs."""
    x = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    return Application(DenseMap(), x, weight, bias)


def read_product(input: Any, other: Any) -> Rewrite | None:
    """Read ``matmul(x, weight)`` and ``bmm``: a matrix ``(in, out)``, or a stack of such."""
    dims = other.dim()
    if dims == 2 and input.dim() >= 1:
        arrangement = Arrangement.transposed(tuple(other.shape))
        return Rewrite(lambda: arranged_linear(input, other, None, arrangement))
    if dims == 3 and input.dim() == 3 and len(input) == len(other):
        return Rewrite(lambda: _stacked_product(input, other))
    return None


def read_addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1
) -> Rewrite | None:
    """Read ``bias + x @ weight``, as the ``Conv1D`` of GPT-2 calls it."""
    if beta != 1 or alpha != 1 or input.shape != mat2.shape[1:]:
        return None
    arrangement = Arrangement.transposed(tuple(mat2.shape))
    return Rewrite(lambda: arranged_linear(mat1, mat2, input, arrangement))


def read_baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1
) -> Rewrite | None:
    """Read ``biases + x @ weights`` for stacks of inputs and weights; the biases are drawn."""
    if beta != 1 or alpha != 1 or len(batch1) != len(batch2):
        return None
    return Rewrite(lambda: input + _stacked_product(batch1, batch2))


def read_grouped_product(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Rewrite | None:
    """Read ``F.grouped_mm`` of rows ``(rows, in)``, of which each weight of a stack has a share."""
    is_plain = bias is None and out_dtype is None
    if mat_b.dim() != 3 or mat_a.dim() != 2 or offs is None or not is_plain:
        return None
    return Rewrite(lambda: _grouped_product(mat_a, mat_b, offs))


def read_einsum(equation: Any, *operands: Any) -> Rewrite | None:
    """Read the product of an input and a weight, in which each index means one thing.

    An index of both and of the result counts a stack of weights, one of both alone is summed, one of
    weight and result is an output's, and one of input and result counts examples or positions.
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str) or "->" not in equation:
        return None
    terms, result = equation.replace(" ", "").split("->")
    if "." in terms or terms.count(",") != 1:
        return None
    ours, theirs = terms.split(",")
    x, weight = operands
    if len({*ours}) < len(ours) or len({*theirs}) < len(theirs):  # a diagonal
        return None
    shared = [i for i in theirs if i in ours]
    stack, rest = [i for i in shared if i in result], [i for i in shared if i not in result]
    out = [i for i in result if i in theirs and i not in ours]
    examples = [i for i in result if i in ours and i not in theirs]
    if {*stack, *rest, *out} != {*theirs} or {*stack, *rest, *examples} != {*ours}:
        return None
    return Rewrite(lambda: _product_by_index(x, weight, ours, theirs, result, (stack, out, rest)))


def _stacked_product(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``x (stack, rows, in)`` times ``weights (stack, in, out)``."""
    arrangement = Arrangement.of_dims((0, 2, 1), tuple(weights.shape), stack=1)
    return arranged_linear(x.transpose(0, 1), weights, None, arrangement).transpose(0, 1)


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return rows ``x (rows, in)``, up to the end of each share, times ``weights (stack, in, out)``."""
    arrangement = Arrangement.transposed(tuple(weights.shape[1:]))
    bounds = [0, *ends.tolist()]
    parts = [
        arranged_linear(x[start:end], weights[number], None, arrangement)
        for number, (start, end) in enumerate(pairwise(bounds))
        if end > start
    ]
    spare = x.new_zeros(len(x) - bounds[-1], weights.shape[-1])
    return torch.cat([*parts, spare])


def _product_by_index(
    x: Tensor,
    weight: Tensor,
    ours: str,
    theirs: str,
    result: str,
    roles: Sequence[Sequence[str]],
) -> Tensor:
    """Return a product of tensors with named dimensions, by one dense layer."""
    stack, out, rest = roles
    arrangement = merged(
        tuple(weight.shape), *(tuple(theirs.index(i) for i in role) for role in roles)
    )
    examples = [i for i in result if i in ours and i not in theirs]
    order = [*examples, *stack, *rest]
    inputs = x.permute([ours.index(i) for i in order])
    inputs = inputs.reshape(*inputs.shape[: len(examples) + len(stack)], -1)
    outputs = arranged_linear(inputs, weight, None, arrangement)
    sizes = [weight.shape[theirs.index(i)] for i in out]
    outputs = outputs.reshape(*outputs.shape[:-1], *sizes)
    found = [*examples, *stack, *out]
    return outputs.permute([found.index(i) for i in result])


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_NOT_SERVED = ("bias_k", "bias_v", "static_k", "static_v")

Attended = tuple[Tensor, Tensor | None]


def read_attention(*args: Any, **kwargs: Any) -> Callable[[], Attended] | None:
    """Read a call of :func:`torch.nn.functional.multi_head_attention_forward`.

    Torch applies the weights to queries, keys and values with the positions first. Here the
    projections are calls of ``F.linear``, and the examples come first, as local reparameterization
    takes them.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        A function that computes what torch's function returns; None for cross-attention with a packed
        weight, which meets several inputs, and where a position is added to the keys.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_self = given["query"] is given["key"] is given["value"]
    is_served = is_self or given["use_separate_proj_weight"]
    if (
        not is_served
        or given["add_zero_attn"]
        or any(given[name] is not None for name in _NOT_SERVED)
    ):
        return None
    return partial(_attend, given)


def _attend(given: Mapping[str, Any]) -> Attended:
    is_batched = given["query"].dim() == 3
    heads, dropout = given["num_heads"], given["dropout_p"] if given["training"] else 0.0
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in _project(given))
    mask = _additive_mask(given["attn_mask"], given["key_padding_mask"], q)
    weights = None
    if given["need_weights"]:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        mixed = weights @ v
        weights = weights.mean(1) if given["average_attn_weights"] else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    joined = mixed.transpose(1, 2).flatten(2)
    outputs = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"])
    return (outputs.transpose(0, 1) if is_batched else outputs.squeeze(0)), weights


def _project(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values, each ``(batch, length, dim)``."""
    names = ("query", "key", "value")
    if not given["use_separate_proj_weight"]:
        x = _batch_first(given["query"])
        return F.linear(x, given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1)
    packed = given["in_proj_bias"]
    biases = (None, None, None) if packed is None else packed.chunk(3)
    weights = (given[f"{name[0]}_proj_weight"] for name in names)
    return tuple(
        F.linear(_batch_first(given[name]), weight, bias)
        for name, weight, bias in zip(names, weights, biases, strict=True)
    )


def _batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1) if x.dim() == 3 else x.unsqueeze(0)


def _additive_mask(
    attention_mask: Tensor | None, padding_mask: Tensor | None, query: Tensor
) -> Tensor | None:
    """Return the sum of both masks, to be added to scores ``(batch, heads, length, length)``."""
    total = None
    if attention_mask is not None:
        total = _as_numbers(attention_mask, query)
        if total.dim() == 3:
            total = total.unflatten(0, query.shape[:2])
    if padding_mask is not None:
        padding = _as_numbers(padding_mask, query)
        padding = padding.reshape(query.shape[0], 1, 1, -1)
        total = padding if total is None else total + padding
    return total


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to be added; minus infinity where a boolean one is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


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
    F.bilinear: read_bilinear,
    F.conv1d: partial(_convolution, F.conv1d),
    F.conv2d: partial(_convolution, F.conv2d),
    F.conv3d: partial(_convolution, F.conv3d),
    F.conv_transpose1d: partial(_transposed_convolution, F.conv_transpose1d),
    F.conv_transpose2d: partial(_transposed_convolution, F.conv_transpose2d),
    F.conv_transpose3d: partial(_transposed_convolution, F.conv_transpose3d),
    F.embedding: _embedding,
    GROUPED_PRODUCT: read_grouped_product,
    F.multi_head_attention_forward: _attention,
    torch.einsum: read_einsum,
    arranged_linear: read_arranged_linear,
    **dict.fromkeys((torch.addmm, Tensor.addmm), read_addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), read_baddbmm),
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
        read_product,
    ),
}


def drawn_per_example(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of inputs and a small factor one for which a lazy factor is drawn anew.

    For layers whose weight is a function of a factor: each example then has a separate weight, at
    the price of the factor's draws, and the joint distribution of its outputs is exact. A decorator, for
    functions of a module. A factor that the model uses twice, or under another objective, is drawn once,
    as any :class:`~pyro_structvi.weights.lazy.LazyWeight`.

    Args:
        function: Called as ``function(x, factor, ...)``. It must take a factor of the sample site's
            shape, and one with the examples ``x.shape[:1]`` in front.

    Returns:
        The function.

    Example:
        >>> import torch
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.weights.site_role import SiteUse
        >>> from pyro_structvi.weights.lazy import LazyWeight
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
