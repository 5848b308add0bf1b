"""Keeping variances and log determinants out of mixed precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves the tensor's device alone."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
