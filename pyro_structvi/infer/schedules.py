"""Schedules: a number for each training step, for the weight of the KL or the learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pyro_structvi._checks import NO_CLASS, CheckedFields, Count, NonNegative, checked

Schedule = Annotated[Callable[[int], float], NO_CLASS]


@dataclass(frozen=True)
class LinearAnnealing(CheckedFields):
    """Rise linearly from ``start`` at step 0 to ``end`` at step ``num_steps``, and stay there.

    Args:
        num_steps: How many steps the rise takes.
        start: The value at step 0.
        end: The value from step ``num_steps`` on.

    Raises:
        ValueError: If ``num_steps`` is not a whole number of at least 1, or a value is negative.

    Example:
        >>> weight = LinearAnnealing(num_steps=100)
        >>> weight(0), weight(25), weight(1000)
        (0.0, 0.25, 1.0)

    References:
        Swiatkowski et al. (2020), appendix A.2: the k-tied Normal needs an annealed KL.
    """

    num_steps: Count
    start: NonNegative = 0.0
    end: NonNegative = 1.0

    @checked
    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        fraction = min(step / self.num_steps, 1.0)
        return self.start + fraction * (self.end - self.start)


@dataclass(frozen=True)
class CosineDecay(CheckedFields):
    """Fall from ``start`` at step 0 to ``end`` at step ``num_steps`` by half a cosine, and stay there.

    Args:
        num_steps: How many steps the fall takes.
        start: The value at step 0.
        end: The value from step ``num_steps`` on.

    Raises:
        ValueError: If ``num_steps`` is not a whole number of at least 1, or a value is negative.

    Example:
        >>> rate = CosineDecay(num_steps=100, start=0.1)
        >>> rate(0), round(rate(50), 3), rate(100)
        (0.1, 0.05, 0.0)
    """

    num_steps: Count
    start: NonNegative = 1.0
    end: NonNegative = 0.0

    @checked
    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        fraction = min(step / self.num_steps, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * fraction)) / 2
