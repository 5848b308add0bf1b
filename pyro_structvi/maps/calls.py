"""Calls of torch that are read as linear maps, row lookups, or other calls."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from pyro_structvi._torch import GROUPED_PRODUCT
from pyro_structvi.maps.attention import attention
from pyro_structvi.maps.convolution import ConvolutionMap, TransposedConvolutionMap
from pyro_structvi.maps.linear_map import DenseMap, LinearMap


@dataclass(frozen=True)
class Arrangement:
    """A permutation of a weight's dimensions to ``(*stack, out, *rest)``, with a reshape.

    ``addmm`` takes a weight ``(in, out)``, a product of stacked matrices ``(stack, in, out)``.

    Attributes:
        dims: The dimensions of the weight in this order; several of them may be outputs.
        shape: The shape after the permutation, with outputs merged.
        stack: The number of dimensions of the stack.

    Example:
        >>> Arrangement.transposed((5, 3))(torch.zeros(5, 3)).shape
        torch.Size([3, 5])
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    stack: int = 0

    @classmethod
    def of_dims(cls, dims: tuple[int, ...], shape: tuple[int, ...], stack: int = 0) -> Self:
        return cls(dims, tuple(shape[d] for d in dims), stack)

    @classmethod
    def transposed(cls, shape: tuple[int, ...]) -> Self:
        """Return the arrangement of a weight ``(in, out, *rest)``."""
        return cls.of_dims((1, 0, *range(2, len(shape))), shape)

    @property
    def is_transpose(self) -> bool:
        return self.dims == (1, 0) and len(self.shape) == 2 and self.stack == 0

    @property
    def is_plain(self) -> bool:
        """Whether it is the identity for one weight."""
        return (
            self.dims == (*range(len(self.dims)),) == (*range(len(self.shape)),) and not self.stack
        )

    @property
    def is_of_vectors(self) -> bool:
        """Whether it is the identity for a stack of vectors, each a weight with one output."""
        has_one = len(self.shape) == self.stack + 2 and self.shape[self.stack] == 1
        return self.stack > 0 and has_one and self.dims == (*range(self.stack + 1),)

    @property
    def event_dim(self) -> int:
        return len(self.shape) - self.stack

    @property
    def split_shape(self) -> tuple[torch.Size, torch.Size]:
        """The shapes of the stack and of one weight."""
        return torch.Size(self.shape[: self.stack]), torch.Size(self.shape[self.stack :])

    def __call__(self, weight: Tensor) -> Tensor:
        """Return arranged weights ``(*lead, *shape)``."""
        lead = weight.dim() - len(self.dims)
        dims = (*range(lead), *(lead + d for d in self.dims))
        return weight.permute(dims).reshape(*weight.shape[:lead], *self.shape)

    def matrices(self, weight: Tensor) -> Tensor:
        """Return a weight as ``(*stack, out, in)``."""
        arranged: Tensor = self(weight).flatten(self.stack + 1)
        return arranged if self.event_dim > 1 else arranged.unsqueeze(-1)

    def after(self, dims: tuple[int, ...]) -> "Arrangement":
        """Return the arrangement of a weight whose view with permuted dimensions has this one."""
        return Arrangement(tuple(dims[d] for d in self.dims), self.shape, self.stack)


class Application(NamedTuple):
    """A call ``linear_map(x, weight, bias)``, with the arrangement of its weight."""

    linear_map: LinearMap
    x: Any
    weight: Any
    bias: Any
    arrangement: Arrangement | None = None

    @property
    def has_positions(self) -> bool:
        """Whether the weight is applied to an example more than once."""
        return self.linear_map.has_positions(self.x)

    @property
    def num_examples(self) -> int:
        stack = 0 if self.arrangement is None else self.arrangement.stack
        lead = self.x.dim() - self.linear_map.event_dim(self.x) - stack
        return self.x.shape[:lead].numel()

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Return a weight as a matrix or a stack of matrices."""
        if self.arrangement is not None:
            return self.arrangement.matrices(weight)
        return weight.flatten(1)


class Lookup(NamedTuple):
    """A lookup of rows by integers ``(batch, *positions)``; ``padding_idx`` gets no gradient."""

    x: Any
    weight: Any
    padding_idx: int | None

    @property
    def indices(self) -> Tensor:
        """The integers as ``(batch, positions)``, with sizes of 1 for missing dimensions."""
        return self.x.reshape(self.x.shape[:1].numel(), self.x.shape[1:].numel())

    @property
    def has_positions(self) -> bool:
        return self.indices.shape[1] > 1

    @property
    def num_examples(self) -> int:
        return len(self.indices)

    def share_draws(self, rows: Tensor) -> Tensor:
        """Replace sampled rows ``(batch, positions, dim)`` by the first with the same index."""
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
    """A call ``function(x, weight)``, whose weight may have a dimension of examples in front."""

    function: Callable[[Tensor, Tensor], Tensor]
    x: Any
    weight: Any

    @property
    def num_examples(self) -> int:
        return len(self.x)


Call = Application | Lookup | FactorApplication


def arranged_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, arrangement: Arrangement
) -> Tensor:
    """Apply a dense layer or a stack of them to ``x (*batch, *stack, in)``.

    The arrangement of the weight is ``(*stack, out, in)``; outputs are ``(*batch, *stack, out)``.
    """
    tensors = (x, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(arranged_linear, tensors, *tensors, arrangement)
    return DenseMap()(x, arrangement.matrices(weight), bias)


def _arranged_linear(x: Any, weight: Any, bias: Any, arrangement: Arrangement) -> Application:
    dense = DenseMap(positions=arrangement.stack == 0)
    return Application(dense, x, weight, bias, arrangement)


def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Application:
    """Read a bilinear layer as a weight ``(out, in1, in2)`` of the products of both inputs."""
    x = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    return Application(DenseMap(), x, weight, bias)


def _linear(input: Any, weight: Any, bias: Any = None) -> Application | None:
    if weight.dim() != 2:  # of a vector, torch returns outputs without a dimension
        return None
    if bias is not None and bias.shape != weight.shape[:1]:  # one element for several outputs
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
    """Read a lookup, or None where it changes the weight's gradient."""
    _check_max_norm(max_norm)
    if weight.dim() != 2 or scale_grad_by_freq:
        return None
    return Lookup(input, weight, padding_idx)


def _embedding_bag(
    input: Any, weight: Any, *args: Any, max_norm: float | None = None, **options: Any
) -> None:
    """Check a sum of lookups, which takes a sample of the weight."""
    if has_torch_function_unary(weight):
        _check_max_norm(max_norm)


def _check_max_norm(max_norm: float | None) -> None:
    """Raise a ``ValueError`` if a lookup would write into the weight, unseen by gradients."""
    if max_norm is not None:
        raise ValueError(
            f"`max_norm` of an embedding must be None where its weight is random, but got {max_norm}: "
            "it writes into draws, and gradients do not see that. Clip the rows that it returns."
        )


# A reader takes the arguments of the call, and may return None.
_READERS: dict[Callable[..., Any], Callable[..., Call | None]] = {
    F.linear: _linear,
    F.bilinear: _bilinear,
    **{each: partial(_convolution, each) for each in (F.conv1d, F.conv2d, F.conv3d)},
    **{
        each: partial(_transposed_convolution, each)
        for each in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    },
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    arranged_linear: _arranged_linear,
}


def drawn_per_example(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a function of inputs and a factor, so that a lazy factor is sampled for each example.

    For layers whose weight is a function of a small factor: the joint distribution of the outputs of an
    example is then exact. A factor that the model uses twice is sampled once.

    Args:
        function: Called as ``function(x, factor, ...)``, also with examples ``x.shape[:1]`` in front of
            the factor.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.weights.lazy import LazyWeight
        >>> from pyro_structvi.weights.site_role import SiteUse
        >>> scale = drawn_per_example(lambda x, factor: x * factor)
        >>> q = MeanFieldNormal(torch.zeros(3), torch.tensor(1.0))
        >>> outputs = scale(torch.ones(2, 3), LazyWeight(q, SiteUse("factor", count=1)))
        >>> bool((outputs[0] == outputs[1]).any())
        False
    """

    @wraps(function)
    def overridable(x: Tensor, factor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(factor):
            return handle_torch_function(overridable, (factor,), x, factor, *args, **kwargs)
        return function(x, factor, *args, **kwargs)

    def read(x: Any, factor: Any, *args: Any, **kwargs: Any) -> FactorApplication:
        return FactorApplication(lambda x, factor: function(x, factor, *args, **kwargs), x, factor)

    _READERS[overridable] = read
    return overridable


def parse_application(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """Return a call as an application of a weight, or None if there is no rule for it."""
    read = _READERS.get(function)
    return None if read is None else read(*args, **kwargs)


# ---- calls that are replaced by others ------------------------------------------------------------


def _product(input: Any, other: Any = None, *, mat2: Any = None) -> Tensor | None:
    """Multiply by a matrix ``(in, out)``, or by a stack of such, which ``mm`` and ``bmm`` call mat2."""
    other = mat2 if other is None else other
    dims = other.dim()
    if dims == 2 and input.dim() >= 1:
        return arranged_linear(input, other, None, Arrangement.transposed(tuple(other.shape)))
    if dims == 3 and input.dim() == 3 and len(input) == len(other):
        arrangement = Arrangement.of_dims((0, 2, 1), tuple(other.shape), stack=1)
        return arranged_linear(input.transpose(0, 1), other, None, arrangement).transpose(0, 1)
    return None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    """Return ``bias + x @ weight``, as the ``Conv1D`` of GPT-2 calls it."""
    if beta != 1 or alpha != 1 or input.shape != mat2.shape[1:]:
        return None
    return arranged_linear(mat1, mat2, input, Arrangement.transposed(tuple(mat2.shape)))


def _baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1
) -> Tensor | None:
    """Return ``biases + x @ weights`` for stacks of inputs and weights; the biases are sampled."""
    product = None if beta != 1 or alpha != 1 else _product(batch1, batch2)
    return None if product is None else input + product


def _grouped_product(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """Apply each weight of a stack ``(stack, in, out)`` to the rows ``(rows, in)`` up to its end."""
    is_plain = bias is None and out_dtype is None
    if mat_b.dim() != 3 or mat_a.dim() != 2 or offs is None or not is_plain:
        return None
    arrangement = Arrangement.transposed(tuple(mat_b.shape[1:]))
    bounds = [0, *offs.tolist()]
    parts = [
        arranged_linear(mat_a[start:end], mat_b[number], None, arrangement)
        for number, (start, end) in enumerate(pairwise(bounds))
        if end > start
    ]
    spare = mat_a.new_zeros(len(mat_a) - bounds[-1], mat_b.shape[-1])
    return torch.cat([*parts, spare])


def _einsum(equation: str, *operands: Any) -> Tensor | None:
    """Return the product of an input and a weight, by one dense layer, if indices have one role each.

    The roles are a stack of weights (in both and the result), a sum (in both), outputs (in weight and
    result), and examples or positions (in input and result).
    """
    if len(operands) != 2 or "->" not in equation:
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
    stacked, outs, ins = (
        [weight.shape[theirs.index(i)] for i in role] for role in (stack, out, rest)
    )
    dims = tuple(theirs.index(i) for i in (*stack, *out, *rest))
    arrangement = Arrangement(dims, (*stacked, math.prod(outs), math.prod(ins)), len(stack))
    inputs = x.permute([ours.index(i) for i in (*examples, *stack, *rest)])
    inputs = inputs.reshape(*inputs.shape[: len(examples) + len(stack)], -1)
    outputs = arranged_linear(inputs, weight, None, arrangement)
    outputs = outputs.reshape((*outputs.shape[:-1], *outs))
    found = [*examples, *stack, *out]
    return outputs.permute([found.index(i) for i in result])


# A rule takes the arguments of the call, and may return None.
_REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _product),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), _product),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    GROUPED_PRODUCT: _grouped_product,
    torch.einsum: _einsum,
    F.multi_head_attention_forward: attention,
}


def rewritten(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any | None:
    """Return the result of a call by other calls that are read, or None if there is no rule for it."""
    rule = _REWRITES.get(function)
    return None if rule is None else rule(*args, **kwargs)
