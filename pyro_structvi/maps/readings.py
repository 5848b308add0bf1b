"""Calls of torch, read as linear maps, look-ups, or other calls."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pyro_structvi.maps.linear_map import LinearMap


@dataclass(frozen=True)
class Arrangement:
    """The order in which a call takes a weight's dimensions: outputs first, then what they sum over.

    ``F.linear`` and convolutions take a weight as it is, ``addmm`` takes it as ``(in, out)``, a product
    of stacked matrices as ``(stack, in, out)``.

    Attributes:
        dims: The weight's dimensions in the order ``(*stack, out, *rest)``; several of them may be the
            outputs, and several the rest.
        shape: The shape that they are then seen in.
        stack: How many dimensions of the shape are a stack of weights.

    Example:
        >>> import torch
        >>> Arrangement.transposed((5, 3))(torch.zeros(5, 3)).shape
        torch.Size([3, 5])
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    stack: int = 0

    @classmethod
    def of_dims(cls, dims: tuple[int, ...], shape: tuple[int, ...], stack: int = 0) -> Self:
        """Return the arrangement of a weight of a shape that merges no dimensions."""
        return cls(dims, tuple(shape[d] for d in dims), stack)

    @classmethod
    def transposed(cls, shape: tuple[int, ...]) -> Self:
        """Return that of a weight ``(in, out, *rest)``."""
        return cls.of_dims((1, 0, *range(2, len(shape))), shape)

    @property
    def is_transpose(self) -> bool:
        """Whether it turns one matrix around, and nothing else."""
        return self.dims == (1, 0) and len(self.shape) == 2 and self.stack == 0

    @property
    def is_plain(self) -> bool:
        """Whether it takes one weight as it is."""
        return (
            self.dims == (*range(len(self.dims)),) == (*range(len(self.shape)),) and not self.stack
        )

    @property
    def event_dim(self) -> int:
        """How many dimensions a single weight has then."""
        return len(self.shape) - self.stack

    def __call__(self, weight: Tensor) -> Tensor:
        """Return weights ``(*lead, *weight)`` in this order, ``(*lead, *shape)``."""
        lead = weight.dim() - len(self.dims)
        dims = (*range(lead), *(lead + d for d in self.dims))
        return weight.permute(dims).reshape(*weight.shape[:lead], *self.shape)

    def matrices(self, weight: Tensor) -> Tensor:
        """Return a weight as ``(*stack, out, in)``."""
        arranged: Tensor = self(weight).flatten(self.stack + 1)
        return arranged if self.event_dim > 1 else arranged.unsqueeze(-1)

    def after(self, dims: tuple[int, ...]) -> "Arrangement":
        """Return the arrangement of a weight of which a view, with these dimensions, has this one."""
        return Arrangement(tuple(dims[d] for d in self.dims), self.shape, self.stack)


def merged(
    shape: tuple[int, ...], stack: tuple[int, ...], out: tuple[int, ...], rest: tuple[int, ...]
) -> Arrangement:
    """Return the arrangement that merges dimensions into ``(*stack, out, in)``.

    Args:
        shape: The weight's shape.
        stack: The dimensions of a stack of weights.
        out: The dimensions of the outputs, in their order.
        rest: The dimensions that outputs sum over.
    """
    sizes = [math.prod(shape[d] for d in dims) for dims in (out, rest)]
    stacked = [shape[d] for d in stack]
    return Arrangement((*stack, *out, *rest), (*stacked, *sizes), len(stack))


class Application(NamedTuple):
    """A call that applies a weight linearly: ``linear_map(x, weight, bias)``.

    With an arrangement, the map takes the weight in that order of its dimensions.
    """

    linear_map: LinearMap
    x: Any
    weight: Any
    bias: Any
    arrangement: Arrangement | None = None

    @property
    def has_positions(self) -> bool:
        """Whether the weight meets one example more than once."""
        return self.linear_map.has_positions(self.x)

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        stack = 0 if self.arrangement is None else self.arrangement.stack
        lead = self.x.dim() - self.linear_map.event_dim(self.x) - stack
        size: int = self.x.shape[:lead].numel()
        return size

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Return a weight as the matrix, or the stack of matrices, that the map takes."""
        if self.arrangement is not None:
            return self.arrangement.matrices(weight)
        return weight.flatten(1)


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
