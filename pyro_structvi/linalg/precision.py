"""Precision of sums and roots, and properties that are cached with their graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast for the device of a tensor."""
    # Torch's own context takes longer than a small operation.
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor has floating-point numbers of less than 32 bits."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4


def at_least_single(tensor: Tensor) -> Tensor:
    """Return half precision as single, and other tensors as they are.

    A sum in bfloat16 is rounded to 8 bits, a log likelihood of -67,000 nats to a multiple of 512.
    """
    return tensor.float() if is_half(tensor) else tensor


def floored_sqrt(variance: Tensor) -> Tensor:
    """Return standard deviations of variances of at least the dtype's smallest normal number.

    A variance of zero, or one that is negative by rounding, then has a finite gradient. The result is at
    least in single precision.
    """
    variance = at_least_single(variance)
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


T = TypeVar("T")


def grad_cached_property(form: Callable[[Any], T]) -> cached_property[T]:
    """Make a method a property that is computed once, with gradients if the object was made with them.

    The object's ``_with_grad`` is the gradient mode of its construction.
    """

    @wraps(form)
    def in_own_mode(owner: Any) -> T:
        with torch.set_grad_enabled(owner._with_grad):
            return form(owner)

    return cached_property(in_own_mode)
