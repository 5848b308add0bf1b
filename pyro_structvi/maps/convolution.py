"""Convolutions and transposed convolutions as linear maps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from pyro_structvi.linalg.matrices import is_half
from pyro_structvi.maps.linear_map import LinearMap


def multiply_each(matrices: Tensor, images: Tensor) -> Tensor:
    """Return ``matrices (g, n, c)`` times ``images (batch, g, c, p)``, ``(batch, g, n, p)``."""
    repeated = matrices.expand(images.shape[0], -1, -1, -1)
    products = torch.bmm(repeated.flatten(0, 1), images.flatten(0, 1))
    return products.reshape(*images.shape[:2], *products.shape[1:])


def add_shifted(
    parts: Sequence[Tensor], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Add the contributions ``(batch, channels, *space)`` of the places of a kernel to outputs."""
    dims = range(len(kernel))
    steps, strides = (for_each_dim(value, len(kernel)) for value in (dilation, stride))
    ends = [steps[d] * (kernel[d] - 1) for d in dims]
    before, after = _margins(padding, kernel, ends)
    shifted = []
    for place, part in zip(product(*map(range, kernel)), parts, strict=True):
        starts = [steps[d] * place[d] for d in dims]
        # The last dimension comes first; negative margins crop pixels without an output.
        pairs = [(before[d] - starts[d], after[d] + starts[d] - ends[d]) for d in reversed(dims)]
        margins = [number for pair in pairs for number in pair]
        shifted.append(F.pad(part, margins) if any(margins) else part)
    sums: Tensor = reduce(torch.add, shifted)
    every: Any = [slice(None, None, step) for step in strides]
    return sums[(..., *every)]


def for_each_dim(value: Any, dims: int) -> tuple[Any, ...]:
    """Return one value for each dimension of space."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values if len(values) == dims else values * dims


def _margins(
    padding: Any, kernel: Sequence[int], ends: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of zeros before and after the pixels in each dimension."""
    if padding == "same":
        before = [end // 2 for end in ends]
        return before, [end - more for end, more in zip(ends, before, strict=True)]
    both = for_each_dim(0 if padding == "valid" else padding, len(kernel))
    return both, both


@dataclass(frozen=True)
class ConvolutionMap(LinearMap):
    """The map of a convolution in one to three dimensions, for any stride, padding and dilation.

    Inputs are ``(batch, c_in, *space)`` or ``(c_in, *space)``.

    Attributes:
        function: ``F.conv1d``, ``F.conv2d`` or ``F.conv3d``, which takes the arguments below.
        kernel_shape: ``(c_in / groups, *kernel)``, the trailing dimensions of the weight.

    Example:
        >>> linear_map = ConvolutionMap(torch.nn.functional.conv1d, (2, 3), padding=1)
        >>> linear_map(torch.ones(5, 2, 7), torch.ones(4, 6)).shape
        torch.Size([5, 4, 7])
    """

    function: Callable[..., Tensor]
    kernel_shape: tuple[int, ...]
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    @property
    def channel_dim(self) -> int:
        return -len(self.kernel_shape)

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._convolve(x, matrix.reshape(-1, *self.kernel_shape), bias)

    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve with the same filters in every group.

        A few filters are applied at all places of the kernel by one product whose parts are shifted
        and added: a convolution takes longer to lay out its input than to apply them.
        """
        bias = None if bias is None else bias.repeat(self.groups)
        if not self._multiplies_first(x, matrix):
            return self(x, matrix.repeat(self.groups, 1), bias)
        hidden = self._shift_products(x, matrix)
        return hidden if bias is None else hidden + bias.reshape(-1, *self._ones)

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, space = self._split(hidden)
        count, pixels = matrix.shape[1], space.numel()
        if count > pixels or not hidden.is_contiguous():
            # The strides of a transposed matrix look like channels-last to torch, which would copy.
            pointwise = matrix.reshape(*matrix.shape, *self._ones).contiguous()
            convolve = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
            return convolve(hidden, pointwise, bias, groups=self.groups)
        channels = hidden.reshape(prod(batch), self.groups, count, pixels)
        mixed = multiply_each(matrix.unflatten(0, (self.groups, -1)), channels)
        outputs = mixed.reshape(*batch, len(matrix), *space)
        return outputs if bias is None else outputs + bias.reshape(-1, *self._ones)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        channel = x.dim() + self.channel_dim
        grouped = x.unflatten(channel, (self.groups, -1))
        lengths = torch.linalg.vector_norm(grouped, dim=channel + 1)
        kernel = (1, *self.kernel_shape[1:])
        norms = replace(self, kernel_shape=kernel).bank(
            lengths.square(), x.new_ones(1, Size(kernel).numel())
        )
        if self.groups == 1:
            return norms
        return norms.repeat_interleave(out // self.groups, self.channel_dim)

    def by_channel(self, x: Tensor, matrix: Tensor) -> Iterator[Tensor]:
        """Yield the parts of the outputs from each input channel of a group, which sum to them."""
        inputs = x.unflatten(x.dim() + self.channel_dim, (self.groups, -1))
        filters = matrix.reshape(-1, *self.kernel_shape).unbind(1)
        of_one = replace(self, kernel_shape=(1, *self.kernel_shape[1:]))
        for image, own in zip(inputs.unbind(self.channel_dim), filters, strict=True):
            yield of_one(image, own)

    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        count, out = matrices.shape[:2]
        flat = self(
            x, self._by_group(matrices, -2), None if biases is None else self._by_group(biases, -1)
        )
        channel = flat.dim() + self.channel_dim
        images: Tensor = flat.unflatten(channel, (self.groups, count, out // self.groups))
        return images.transpose(channel, channel + 1).flatten(channel + 1, channel + 2)

    def event_dim(self, outputs: Tensor) -> int:
        return len(self.kernel_shape)

    def has_positions(self, x: Tensor) -> bool:
        return True

    def _convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        return self.function(
            x, filters, bias, self.stride, self.padding, self.dilation, self.groups
        )

    def _multiplies_first(self, x: Tensor, matrix: Tensor) -> bool:
        """Whether filters at all places of the kernel are no more than the channels of the input."""
        places = Size(self.kernel_shape[1:]).numel()
        is_few = len(matrix) * places <= self.kernel_shape[0]
        return is_few and x.is_contiguous() and not is_half(x)

    def _shift_products(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiply by all filters at each place of the kernel, then shift the products and add."""
        batch, space = self._split(x)
        count, (channels, *kernel) = len(matrix), self.kernel_shape
        places, images = Size(kernel).numel(), prod(batch) * self.groups
        filters = matrix.reshape(count, channels, places).permute(2, 0, 1).flatten(0, 1)
        pixels = x.reshape(images, 1, channels, space.numel())
        products = multiply_each(filters.unsqueeze(0), pixels).reshape(
            images, places, count, *space
        )
        sums = add_shifted(products.unbind(1), kernel, self.stride, self.padding, self.dilation)
        return sums.reshape(*batch, self.groups * count, *sums.shape[2:])

    def _split(self, x: Tensor) -> tuple[Size, Size]:
        channel = x.dim() + self.channel_dim
        return x.shape[:channel], x.shape[channel + 1 :]

    @property
    def _ones(self) -> list[int]:
        """A one for each dimension of space, to broadcast over positions."""
        return [1 for _ in self.kernel_shape[1:]]

    def _by_group(self, stacked: Tensor, channel_dim: int) -> Tensor:
        """Reshape ``(K, out, ...)`` to ``(K * out, ...)``, ordered by group."""
        grouped: Tensor = stacked.unflatten(channel_dim, (self.groups, -1))
        return grouped.transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class TransposedConvolutionMap(ConvolutionMap):
    """The map of :func:`torch.nn.functional.conv_transpose2d` and its like, without groups.

    The weight is seen as ``(out, in, *kernel)``; torch keeps it as ``(in, out, *kernel)``.
    """

    output_padding: Any = 0

    def _convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        settings = (self.stride, self.padding, self.output_padding, 1, self.dilation)
        filters = filters.transpose(0, 1).to(x.dtype)  # autocast on a CPU casts products alone
        return self.function(x, filters, bias, *settings)

    def _multiplies_first(self, x: Tensor, matrix: Tensor) -> bool:
        """Return False, since a transposed convolution has no shifted inputs."""
        return False
