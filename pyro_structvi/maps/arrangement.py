"""In which order a call takes the dimensions of a weight."""

import math
from dataclasses import dataclass
from typing import Self

from torch import Tensor


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
