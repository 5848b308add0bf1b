"""Convolutions as products at each pixel, whose parts are shifted and added."""

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multiply_each(matrices: Tensor, images: Tensor) -> Tensor:
    """Return ``matrices (g, n, c)`` times ``images (batch, g, c, p)``, ``(batch, g, n, p)``."""
    repeated = matrices.expand(len(images), -1, -1, -1)
    products = torch.bmm(repeated.flatten(0, 1), images.flatten(0, 1))
    return products.reshape(*images.shape[:2], *products.shape[1:])


def add_shifted(
    parts: Sequence[Tensor], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Add what each place of a kernel contributes to the outputs of a convolution.

    Args:
        parts: For each place, in the order of a flat kernel, what it contributes from each pixel,
            ``(batch, channels, *space)``.
        kernel: The shape of the kernel.
        stride: As in the convolution.
        padding: As in the convolution.
        dilation: As in the convolution.

    Returns:
        Sums ``(batch, channels, *positions)``.
    """
    dims = range(len(kernel))
    steps, strides = _for_each_dim(dilation, kernel), _for_each_dim(stride, kernel)
    ends = [steps[d] * (kernel[d] - 1) for d in dims]
    before, after = _margins(padding, kernel, ends)
    shifted = []
    for place, part in zip(product(*map(range, kernel)), parts, strict=True):
        starts = [steps[d] * place[d] for d in dims]
        # The last dimension comes first; negative numbers cut off what reaches no output.
        pairs = [(before[d] - starts[d], after[d] + starts[d] - ends[d]) for d in reversed(dims)]
        margins = [number for pair in pairs for number in pair]
        shifted.append(F.pad(part, margins) if any(margins) else part)
    sums: Tensor = reduce(torch.add, shifted)
    every: Any = [slice(None, None, step) for step in strides]
    return sums[(..., *every)]


def _for_each_dim(value: Any, kernel: Sequence[int]) -> tuple[int, ...]:
    """Return one number for each dimension of space."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * len(kernel) if len(numbers) == 1 else numbers


def _margins(
    padding: Any, kernel: Sequence[int], ends: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return how many zeros are before and after the pixels in each dimension."""
    if padding == "same":
        before = [end // 2 for end in ends]
        return before, [end - more for end, more in zip(ends, before, strict=True)]
    both = _for_each_dim(0 if padding == "valid" else padding, kernel)
    return both, both
