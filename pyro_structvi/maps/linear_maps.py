"""Linear layers and convolutions as one map: a matrix applied to patches of the input.

A weight ``(out, *rest)`` is seen as the matrix ``(out, in)`` with ``in = prod(rest)``. A dense layer
applies it to the last dimension of its input. A convolution applies it to every patch, that is, at
every *position*. A structured posterior needs few operations: the map itself, the same map with
another bank of filters, a recombination of channels that leaves positions alone, the squared norm of
every patch, and several weights at once, apart (``stack``) or summed (``combine``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from pyro_structvi.linalg.fused import bank_and_squared_norm


@dataclass(frozen=True)
class DenseMap:
    """The map of :func:`torch.nn.functional.linear`; the output's channels are its last dimension.

    Matrices may carry batch dimensions in front; they then broadcast against those of the input.

    Attributes:
        positions: Whether the dimensions of an input between its first and its last are positions
            of one example, as in a sequence. Otherwise each of them counts examples too.
    """

    positions: bool = True

    @property
    def groups(self) -> int:
        """How many parts the channels fall into; one."""
        return 1

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

    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a bank of filters ``(M, in)`` in place of the weight, giving ``M`` channels."""
        return self(x, matrix, bias)

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine the channels of a bank's output by ``matrix (out, M)``."""
        return self(hidden, matrix, bias)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        """Return ``|x|^2`` for every output, broadcastable to the ``out`` channels."""
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return lengths.square()

    def bank_and_squared_norm(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return :meth:`bank`, and :meth:`squared_norm` with one channel."""
        if matrix.dim() > 2:
            return self.bank(x, matrix, bias), self.squared_norm(x, 1)
        hidden, norms = bank_and_squared_norm(x.reshape(-1, x.shape[-1]), matrix)
        if bias is not None:
            hidden = hidden + bias
        lead = x.shape[:-1]
        return hidden.reshape(*lead, -1), norms.reshape(*lead, 1)

    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        """Apply ``K`` weights ``(*b, K, out, in)`` as one, giving ``(*batch, K, *event)``."""
        flat = self(x, matrices.flatten(-3, -2), None if biases is None else biases.flatten(-2))
        images: Tensor = flat.unflatten(-1, matrices.shape[-3:-1])
        return images.movedim(-2, -1 - self.event_dim(images[..., 0, :]))

    def combine(
        self,
        x: Tensor,
        coefficients: Tensor,
        matrices: Tensor,
        onto: Tensor,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Add ``K`` images, weighed by ``coefficients (*batch, K)`` of each example, onto outputs.

        The coefficients multiply the inputs or the outputs, whichever forms the smaller tensors.
        """
        if matrices.dim() > 3 or not _is_smaller_inside(x, matrices, onto):
            return _add_weighted(onto, coefficients, self.stack(x, matrices, biases))
        if biases is not None:
            shift = coefficients @ biases
            positions = [1 for _ in range(x.dim() - coefficients.dim())]
            onto = onto + shift.reshape(*shift.shape[:-1], *positions, -1)
        positions = [1 for _ in range(x.dim() - coefficients.dim())]
        spread = coefficients.reshape(*coefficients.shape[:-1], *positions, -1, 1)
        inputs = (spread * x.unsqueeze(-2)).flatten(-2)
        matrix = matrices.transpose(0, 1).flatten(1)
        rows = inputs.reshape(-1, inputs.shape[-1])
        total = torch.addmm(onto.reshape(len(rows), -1), rows, matrix.mT)
        return total.reshape(onto.shape)

    def join_bias(self, x: Tensor) -> "tuple[LinearMap, Tensor]":
        """Return map and input for which a matrix ``(out, in + 1)`` is a weight and its bias."""
        return self, torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)

    def event_dim(self, outputs: Tensor) -> int:
        """How many trailing dimensions of the outputs belong to one example."""
        return max(outputs.dim() - 1, 1) if self.positions else 1

    def has_positions(self, x: Tensor) -> bool:
        """Whether the weight meets one example more than once."""
        return self.positions and x.dim() > 2


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

    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a bank of filters ``(M, in)`` to every group, giving ``groups * M`` channels."""
        return self(
            x, matrix.repeat(self.groups, 1), None if bias is None else bias.repeat(self.groups)
        )

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine the channels of a bank's output by ``matrix (out, M)``, group by group."""
        pointwise = matrix.reshape(*matrix.shape, *(1 for _ in self.kernel_shape[1:]))
        # By the strides of a transposed matrix torch would take all for channels-last, and copy.
        return self.function(hidden, pointwise.contiguous(), bias, groups=self.groups)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        """Return ``|patch|^2`` for every output, broadcastable to the ``out`` channels."""
        channel = x.dim() + self.channel_dim
        grouped = x.unflatten(channel, (self.groups, -1))
        lengths = torch.linalg.vector_norm(grouped, dim=channel + 1)
        kernel = (1, *self.kernel_shape[1:])
        norms = replace(self, kernel_shape=kernel).bank(
            lengths.square(), x.new_ones(1, Size(kernel).numel())
        )
        if self.groups == 1:
            return norms
        repeated: Tensor = norms.repeat_interleave(out // self.groups, self.channel_dim)
        return repeated

    def bank_and_squared_norm(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return :meth:`bank`, and :meth:`squared_norm` with a channel for each group."""
        return self.bank(x, matrix, bias), self.squared_norm(x, self.groups)

    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        """Apply ``K`` weights ``(K, out, in)`` as one, giving ``(*batch, K, *event)``."""
        count, out = matrices.shape[:2]
        flat = self(
            x, self._by_group(matrices, -2), None if biases is None else self._by_group(biases, -1)
        )
        channel = flat.dim() + self.channel_dim
        images: Tensor = flat.unflatten(channel, (self.groups, count, out // self.groups))
        return images.transpose(channel, channel + 1).flatten(channel + 1, channel + 2)

    def combine(
        self,
        x: Tensor,
        coefficients: Tensor,
        matrices: Tensor,
        onto: Tensor,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Add ``K`` images, weighed by ``coefficients (*batch, K)`` of each example, onto outputs.

        The coefficients multiply the inputs or the outputs, whichever forms the smaller tensors.
        """
        if not _is_smaller_inside(x, matrices, onto):
            return _add_weighted(onto, coefficients, self.stack(x, matrices, biases))
        space = [1 for _ in self.kernel_shape[1:]]
        channel = x.dim() + self.channel_dim
        grouped = x.unflatten(channel, (self.groups, 1, -1))
        spread = coefficients.reshape(*coefficients.shape[:-1], 1, -1, 1, *space)
        inputs = (spread * grouped).flatten(channel, channel + 2)
        filters = matrices.transpose(0, 1).reshape(matrices.shape[1], -1, *self.kernel_shape[1:])
        total = onto + self.function(
            inputs, filters, None, self.stride, self.padding, self.dilation, self.groups
        )
        if biases is None:
            return total
        return total + (coefficients @ biases).reshape(*coefficients.shape[:-1], -1, *space)

    def join_bias(self, x: Tensor) -> "tuple[LinearMap, Tensor]":
        """Return map and input for which a matrix ``(out, in + 1)`` is a weight and its bias."""
        return BiasColumnMap(self), x

    def event_dim(self, outputs: Tensor) -> int:
        """How many trailing dimensions of the outputs belong to one example."""
        return len(self.kernel_shape)

    def has_positions(self, x: Tensor) -> bool:
        """Whether the weight meets one example more than once."""
        return True

    def _by_group(self, stacked: Tensor, channel_dim: int) -> Tensor:
        """Turn ``(K, out, ...)`` into ``(K * out, ...)`` with the channels of a group together."""
        grouped: Tensor = stacked.unflatten(channel_dim, (self.groups, -1))
        return grouped.transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class BiasColumnMap:
    """A map whose matrices ``(out, in + 1)`` have the bias as their last column.

    For a convolution a channel of ones in the input would not do, since padding adds zeros to it. For
    a dense map it would, see :meth:`DenseMap.join_bias`; which is faster depends on the structure.

    Attributes:
        linear_map: The map without the column.
    """

    linear_map: DenseMap | ConvolutionMap

    @property
    def groups(self) -> int:
        """How many parts the channels fall into, each with filters of its own."""
        return self.linear_map.groups

    @property
    def channel_dim(self) -> int:
        """The output dimension that holds the ``out`` channels, counted from the right."""
        return self.linear_map.channel_dim

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a matrix, bias included; a further ``bias`` is added."""
        column = matrix[..., -1]
        return self.linear_map(x, matrix[..., :-1], column if bias is None else column + bias)

    def bank(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Apply a bank of filters ``(M, in + 1)`` in place of the weight."""
        return self.linear_map.bank(x, matrix[..., :-1], matrix[..., -1])

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine the channels of a bank's output by ``matrix (out, M)``."""
        return self.linear_map.mix(hidden, matrix, bias)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        """Return ``|patch|^2 + 1`` for every output, broadcastable to the ``out`` channels."""
        return self.linear_map.squared_norm(x, out) + 1

    def bank_and_squared_norm(self, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`bank`, and :meth:`squared_norm` with a channel for each group."""
        hidden, norms = self.linear_map.bank_and_squared_norm(x, matrix[..., :-1], matrix[..., -1])
        return hidden, norms + 1

    def stack(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Apply ``K`` weights ``(K, out, in + 1)`` as one, giving ``(*batch, K, *event)``."""
        return self.linear_map.stack(x, matrices[..., :-1], matrices[..., -1])

    def combine(self, x: Tensor, coefficients: Tensor, matrices: Tensor, onto: Tensor) -> Tensor:
        """Add ``K`` images, weighed by ``coefficients (*batch, K)`` of each example, onto outputs."""
        return self.linear_map.combine(x, coefficients, matrices[..., :-1], onto, matrices[..., -1])

    def event_dim(self, outputs: Tensor) -> int:
        """How many trailing dimensions of the outputs belong to one example."""
        return self.linear_map.event_dim(outputs)

    def has_positions(self, x: Tensor) -> bool:
        """Whether the weight meets one example more than once."""
        return self.linear_map.has_positions(x)


LinearMap = DenseMap | ConvolutionMap | BiasColumnMap


class FactoredDraw(Protocol):
    """One draw of a weight that can be applied without being formed."""

    def weight(self) -> Tensor:
        """Return the weight."""

    def apply(self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``linear_map(x, W) + bias``."""


def shape_per_example(linear_map: LinearMap, x: Tensor, size: int) -> list[int]:
    """Return the shape of ``size`` channels for each example that meets ``x`` at all positions."""
    batch = x.shape[: x.dim() - linear_map.event_dim(x)]
    positions = x.dim() + linear_map.channel_dim - len(batch)
    space = -linear_map.channel_dim - 1
    return [*batch, *(1 for _ in range(positions)), size, *(1 for _ in range(space))]


def _add_weighted(onto: Tensor, coefficients: Tensor, images: Tensor) -> Tensor:
    """Add ``images (*batch, K, *event)``, weighed by ``coefficients (*batch, K)``, onto outputs."""
    batch, rank = coefficients.shape[:-1].numel(), coefficients.shape[-1]
    size = images.shape[coefficients.dim() :].numel()
    total = torch.baddbmm(
        onto.reshape(batch, 1, size),
        coefficients.reshape(batch, 1, rank),
        images.reshape(batch, rank, size),
    )
    return total.reshape(onto.shape)


def _is_smaller_inside(x: Tensor, matrices: Tensor, outputs: Tensor) -> bool:
    """Whether inputs times coefficients, and matrices rearranged for them, are less than outputs."""
    rearranged = 0 if len(matrices) == 1 else matrices[0].numel()
    return x.numel() + rearranged < outputs.numel()
