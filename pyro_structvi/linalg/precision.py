"""Precision of variances, their roots, and log determinants."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves the tensor's device alone."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def floored_sqrt(variance: Tensor) -> Tensor:
    """Return standard deviations, with a floor under the variance in the dtype's own scale.

    A variance of zero (an input of zeros), or one that a convolution's rounding turned negative,
    keeps a finite gradient. Half precision, in which autocast has variances, gets roots in single.
    """
    if torch.finfo(variance.dtype).bits < 32:
        variance = variance.float()
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
