"""The protocol of linear maps: what dense layers and convolutions have in common."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class LinearMap(ABC):
    r"""A layer as a map that is linear in its weight.

    A weight ``(out, *rest)`` is seen as the matrix ``(out, in)`` with ``in = prod(rest)``. The map
    applies it at every *position* p of every example n to one vector, the *patch*:

    .. math:: y_{np} = W x_{np} + b

    A dense layer has one position for each vector of its input; a convolution has one for each place of
    its filter. Structured posteriors are written against this class and hold for every map. Any map can
    be put in the place of any other: all members take the same arguments.

    **Required** of a subclass: ``channel_dim``, ``__call__``, ``bank``, ``mix``, ``squared_norm``,
    ``stack``, ``join_bias``, ``event_dim``, ``has_positions``. **Optional**, with its default in
    brackets: ``groups`` (1), ``is_dense`` (False), ``has_bias_column`` (False), ``without_positions``
    (the map itself), ``bank_and_squared_norm`` (one call after the other), ``combine`` (by ``stack``).

    Shapes: an input is ``(*batch, *in_event)``, and outputs are ``(*batch, *event)`` with ``out``
    channels at ``channel_dim``. Maps are immutable, and equal if their settings are equal.
    """

    @property
    @abstractmethod
    def channel_dim(self) -> int:
        """The dimension of inputs and outputs that holds the channels, counted from the right."""

    @property
    def groups(self) -> int:
        """The number of groups of channels; inputs of one group reach outputs of that group only."""
        return 1

    @property
    def is_dense(self) -> bool:
        """Whether outputs are ``x @ matrix.mT``, so that inputs are the patches as they are."""
        return False

    @property
    def has_bias_column(self) -> bool:
        """Whether the last column of a matrix is a bias, so that every patch ends in a one."""
        return False

    def without_positions(self) -> "LinearMap":
        """Return the map for which dimensions between the first and the last count examples.

        A convolution keeps its positions.
        """
        return self

    @abstractmethod
    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a weight.

        Args:
            x: Inputs.
            matrix: The weight as a matrix ``(out, in)``. A dense map also takes ``(*b, out, in)``, whose
                dimensions ``b`` broadcast against those of the input.
            bias: Nothing, or a bias ``(out,)``; ``(*b, out)`` with a batch of matrices.

        Returns:
            Outputs ``(*batch, *event)``.
        """

    @abstractmethod
    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply a bank of filters in place of the weight, to every group alike.

        Args:
            x: Inputs.
            matrix: Filters ``(M, in)``, in any number; batches as in ``__call__``.
            bias: Nothing, or one number for each filter, ``(M,)``.

        Returns:
            ``groups * M`` channels at every position, those of a group together.
        """

    @abstractmethod
    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine channels at every position, so that ``mix(bank(x, V), U)`` is the map of ``U V``.

        Args:
            hidden: What :meth:`bank` returns.
            matrix: Coefficients ``(out, M)``; the rows of a group meet its channels.
            bias: Nothing, or a bias ``(out,)``.

        Returns:
            Outputs ``(*batch, *event)``.
        """

    @abstractmethod
    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        """Return the squared Euclidean norm of the patch that each output sees.

        Args:
            x: Inputs.
            out: The number of outputs.

        Returns:
            Norms that broadcast to the outputs: one channel, or ``out`` where there are several groups.
        """

    def bank_and_squared_norm(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return :meth:`bank`, and :meth:`squared_norm` with one channel for each group."""
        return self.bank(x, matrix, bias), self.squared_norm(x, self.groups)

    @abstractmethod
    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        """Apply several weights to the same inputs, in one call.

        Args:
            x: Inputs.
            matrices: ``K`` weights ``(K, out, in)``; for a dense map also ``(*b, K, out, in)``.
            biases: Nothing, or their biases ``(K, out)``; ``(*b, K, out)`` with batches.

        Returns:
            Their outputs, ``(*batch, K, *event)``.
        """

    def combine(
        self,
        x: Tensor,
        coefficients: Tensor,
        matrices: Tensor,
        onto: Tensor,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Add the outputs of several weights, times coefficients of each example, onto outputs.

        Args:
            x: Inputs.
            coefficients: One number for each example and weight, ``(*batch, K)``.
            matrices: As in :meth:`stack`.
            onto: The tensor to add to, ``(*batch, *event)``.
            biases: As in :meth:`stack`.

        Returns:
            A new tensor ``(*batch, *event)``. The coefficients multiply inputs or outputs, whichever
            forms the smaller tensors.
        """
        images = self.stack(x, matrices, biases)
        batch, count = coefficients.shape[:-1].numel(), coefficients.shape[-1]
        size = images.shape[coefficients.dim() :].numel()
        total = torch.baddbmm(
            onto.reshape(batch, 1, size),
            coefficients.reshape(batch, 1, count),
            images.reshape(batch, count, size),
        )
        return total.reshape(onto.shape)

    @abstractmethod
    def join_bias(self, x: Tensor) -> "tuple[LinearMap, Tensor]":
        """Return map and input for which a matrix ``(out, in + 1)`` is a weight with its bias."""

    @abstractmethod
    def event_dim(self, outputs: Tensor) -> int:
        """Return how many trailing dimensions of outputs, or of inputs, belong to one example."""

    @abstractmethod
    def has_positions(self, x: Tensor) -> bool:
        """Return whether an example may meet the weight at more than one position."""

    @staticmethod
    def _scales_inputs(x: Tensor, matrices: Tensor, outputs: Tensor) -> bool:
        """Whether inputs times coefficients, and matrices rearranged for them, are less than outputs."""
        rearranged = 0 if len(matrices) == 1 else matrices[0].numel()
        return x.numel() + rearranged < outputs.numel()


class FactoredDraw(Protocol):
    """One draw of a weight that can be applied without being formed."""

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
