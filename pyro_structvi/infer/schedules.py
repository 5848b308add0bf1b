"""Schedules: a number for each training step, for the weight of the KL or the learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyro_structvi._checks import check_positive_integer

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class LinearAnnealing:
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

    num_steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_positive_integer("num_steps", self.num_steps)
        for name in ("start", "end"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"`{name}` must be a finite number of at least 0, but got {getattr(self, name)!r}."
                )

    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        fraction = min(step / self.num_steps, 1.0)
        return self.start + fraction * (self.end - self.start)


@dataclass(frozen=True)
class CosineDecay:
    """Fall from 1 at step 0 to ``end`` at step ``num_steps`` along half a cosine, and stay there.

    Args:
        num_steps: How many steps the fall takes.
        end: The value from step ``num_steps`` on.

    Raises:
        ValueError: If ``num_steps`` is not a whole number of at least 1.

    Example:
        >>> decay = CosineDecay(num_steps=100, end=0.1)
        >>> decay(0), round(decay(50), 3), decay(100)
        (1.0, 0.55, 0.1)
    """

    num_steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        """Check the number of steps."""
        check_positive_integer("num_steps", self.num_steps)

    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        fraction = min(step / self.num_steps, 1.0)
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * fraction)) / 2
