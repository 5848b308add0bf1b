"""Precision of sums and roots, and tensors that are formed once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves the tensor's device alone.

    Where it is off already that is no context of torch's, which takes longer than a small operation.
    """
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers of less than 32 bits."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4


def at_least_single(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision in single; any other as it is.

    A sum in bfloat16 is rounded to 8 bits: a log likelihood of -67,000 nats to the next 512.
    """
    return tensor.float() if is_half(tensor) else tensor


def floored_sqrt(variance: Tensor) -> Tensor:
    """Return standard deviations, with a floor under the variance in the dtype's own scale.

    A variance of zero (an input of zeros), or one that a convolution's rounding turned negative,
    keeps a finite gradient. Half precision, in which autocast has variances, gets roots in single.
    """
    variance = at_least_single(variance)
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


T = TypeVar("T")


def grad_cached_property(form: Callable[[Any], T]) -> cached_property[T]:
    """Make a method a property, computed at its first use and kept with its graph.

    The object's ``_with_grad`` is the gradient mode it was made in.
    """

    @wraps(form)
    def in_own_mode(owner: Any) -> T:
        with torch.set_grad_enabled(owner._with_grad):
            return form(owner)

    return cached_property(in_own_mode)
