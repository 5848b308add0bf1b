"""Roots of increasing functions, element by element."""

from collections.abc import Callable

import torch
from torch import Tensor

HALVINGS = 60  # after which double precision has no bits left


def bisect(is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return where a condition turns false, between two ends of each element.

    Args:
        is_below: Whether the points, of the ends' shape, lie below the root.
        low: Points at or below it.
        high: Points at or above it.
    """
    for _ in range(HALVINGS):
        middle = low + (high - low) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
