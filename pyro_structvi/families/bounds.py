"""A positive number with an optional bound from above, by an unconstrained one."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def capped(log_value: Tensor, most: float | None) -> Tensor:
    """Return ``exp(log_value)``, bent smoothly to stay below a bound.

    Args:
        log_value: Unconstrained; well below the bound, the logarithm of the value.
        most: The bound, or None.

    Returns:
        Positive numbers below ``most``, with a gradient everywhere.

    Example:
        >>> capped(torch.tensor([-9.0, 9.0]), most=1.0)
        tensor([1.2339e-04, 9.9988e-01])
    """
    return log_value.exp() if most is None else most * torch.sigmoid(log_value - math.log(most))


def capped_log(log_value: Tensor, most: float | None) -> Tensor:
    """Return the logarithm of :func:`capped`, accurate far below the bound.

    Args:
        log_value: As for :func:`capped`.
        most: The bound, or None.
    """
    if most is None:
        return log_value
    return math.log(most) + F.logsigmoid(log_value - math.log(most))


def uncapped(value: float, most: float | None) -> float:
    """Return what :func:`capped` turns into a value, or into half the bound if that is less.

    Args:
        value: The value to start at, positive.
        most: The bound, or None.
    """
    if most is None:
        return math.log(value)
    value = min(value, most / 2)
    return math.log(value) - math.log1p(-value / most)
