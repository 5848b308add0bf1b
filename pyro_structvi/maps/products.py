"""Products of tensors, read as dense layers whose weight has its dimensions in another order."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pyro_structvi.maps.arrangement import Arrangement, merged
from pyro_structvi.maps.dense import DenseMap
from pyro_structvi.maps.readings import Application, Rewrite


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
