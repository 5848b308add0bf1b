"""The protocol of linear maps, dense maps, and maps with a bias column."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearMap(ABC):
    """A layer as a map that is linear in its weight.

    A weight ``(out, *rest)`` is seen as the matrix ``(out, in)`` with ``in = prod(rest)``. The map
    applies it to the *patch* at every *position* p of every example n:

    .. math:: y_{np} = W x_{np} + b

    A dense layer has one position for each vector of its input, a convolution one for each place of its
    filter. An input is ``(*batch, *in_event)``, and outputs are ``(*batch, *event)`` with ``out``
    channels at ``channel_dim``. Maps are immutable, and equal if their settings are equal.

    Attributes:
        is_dense: Whether outputs are ``x @ matrix.mT``, so that the patches are the inputs.
        has_bias_column: Whether the last column of a matrix is a bias, so that patches end in a one.
    """

    is_dense: ClassVar[bool] = False
    has_bias_column: ClassVar[bool] = False

    @property
    @abstractmethod
    def channel_dim(self) -> int:
        """The dimension of the channels of inputs and outputs, counted from the right."""

    def without_positions(self) -> "LinearMap":
        """Return a dense map whose inputs have no positions; a convolution keeps its positions."""
        return self

    @property
    def groups(self) -> int:
        """The number of groups of channels; inputs of one group reach outputs of that group only."""
        return 1

    @abstractmethod
    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a weight ``(out, in)`` and a bias ``(out,)``; a dense map broadcasts batches of both."""

    @abstractmethod
    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply filters ``matrix (M, in)`` to every group in place of the weight, with a bias ``(M,)``.

        The result has ``groups * M`` channels at every position, ordered by group.
        """

    @abstractmethod
    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine a group's channels by ``(out, M)``: ``mix(bank(x, V), U)`` is the map of ``U V``."""

    @abstractmethod
    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        """Return the squared norm of each output's patch, with one channel, or ``out`` for groups."""

    @abstractmethod
    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        """Apply weights ``(K, out, in)`` with biases ``(K, out)`` at once, ``(*batch, K, *event)``.

        A dense map also takes batches ``(*b, K, out, in)``.
        """

    def join_bias(self, x: Tensor) -> "tuple[LinearMap, Tensor]":
        """Return map and input for matrices ``(out, in + 1)`` whose last column is a bias."""
        return BiasColumnMap(self), x

    @abstractmethod
    def event_dim(self, outputs: Tensor) -> int:
        """Return the number of trailing dimensions of outputs, or of inputs, for one example."""

    @abstractmethod
    def has_positions(self, x: Tensor) -> bool:
        """Return whether an example may have more than one position."""


class FactoredDraw(Protocol):
    """A sample of a weight that can be applied without being formed."""

    def weight(self) -> Tensor:
        """Return the weight."""

    def apply(self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``linear_map(x, W) + bias``."""


def shape_per_example(linear_map: LinearMap, x: Tensor, size: int) -> list[int]:
    """Return the shape of ``size`` channels for each example, which broadcasts over positions."""
    batch = x.shape[: x.dim() - linear_map.event_dim(x)]
    positions = x.dim() + linear_map.channel_dim - len(batch)
    space = -linear_map.channel_dim - 1
    return [*batch, *(1 for _ in range(positions)), size, *(1 for _ in range(space))]


@dataclass(frozen=True)
class DenseMap(LinearMap):
    """The map of :func:`torch.nn.functional.linear`; the channels are the last dimension.

    Attributes:
        positions: Whether the inner dimensions of an input are positions of one example, as in a
            sequence; else they count examples.

    Example:
        >>> DenseMap()(torch.ones(5, 3), torch.ones(2, 3)).shape
        torch.Size([5, 2])
    """

    positions: bool = True
    channel_dim: ClassVar[int] = -1
    is_dense: ClassVar[bool] = True

    def without_positions(self) -> "DenseMap":
        return DenseMap(positions=False)

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        if matrix.dim() == 2:
            return F.linear(x, matrix, bias)
        image = torch.einsum("...oi,...i->...o", matrix, x)
        return image if bias is None else image + bias

    bank = __call__

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return self(hidden, matrix, bias)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return lengths.square()

    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        flat = self(x, matrices.flatten(-3, -2), None if biases is None else biases.flatten(-2))
        images: Tensor = flat.unflatten(-1, matrices.shape[-3:-1])
        return images.movedim(-2, -1 - self.event_dim(images[..., 0, :]))

    def join_bias(self, x: Tensor) -> tuple[LinearMap, Tensor]:
        return self, torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)

    def event_dim(self, outputs: Tensor) -> int:
        return max(outputs.dim() - 1, 1) if self.positions else 1

    def has_positions(self, x: Tensor) -> bool:
        return self.positions and x.dim() > 2


@dataclass(frozen=True)
class BiasColumnMap(LinearMap):
    """A map of matrices ``(out, in + 1)`` whose last column is a bias, plus any separate bias.

    Padding would add zeros to a channel of ones, the alternative for dense maps.
    """

    linear_map: LinearMap
    has_bias_column: ClassVar[bool] = True

    @property
    def channel_dim(self) -> int:
        return self.linear_map.channel_dim

    @property
    def groups(self) -> int:
        return self.linear_map.groups

    def without_positions(self) -> "BiasColumnMap":
        return BiasColumnMap(self.linear_map.without_positions())

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear_map(x, *_split(matrix, bias))

    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear_map.bank(x, *_split(matrix, bias))

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear_map.mix(hidden, matrix, bias)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        return self.linear_map.squared_norm(x, out) + 1

    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        return self.linear_map.stack(x, *_split(matrices, biases))

    def event_dim(self, outputs: Tensor) -> int:
        return self.linear_map.event_dim(outputs)

    def has_positions(self, x: Tensor) -> bool:
        return self.linear_map.has_positions(x)


def _split(matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the matrix without its last column, and that column plus the bias."""
    column = matrix[..., -1]
    return matrix[..., :-1], column if bias is None else column + bias
