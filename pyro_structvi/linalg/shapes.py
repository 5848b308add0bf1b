"""Sums over events, repeated entries, and noise of a tensor's kind."""

from typing import Any

import torch
from torch import Tensor


def standard_normal(shape: Any, like: Tensor) -> Tensor:
    """Draw standard normal noise of the dtype and device of a tensor."""
    return torch.randn(shape, dtype=like.dtype, device=like.device)


def identity_like(matrix: Tensor) -> Tensor:
    """Return the identity of the size, dtype and device of a square matrix ``(*batch, n, n)``."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def event_sum(tensor: Tensor, event_dim: int) -> Tensor:
    """Sum over the last dimensions; a scalar event has none, and torch would then sum all."""
    return tensor.sum(tuple(range(-event_dim, 0))) if event_dim else tensor


def shrink(tensor: Tensor, event_dim: int) -> Tensor:
    """Return ``(*batch, *event)`` with every event dimension that repeats one entry at size 1.

    What :meth:`torch.Tensor.expand` made large is small again; a tensor of one number in memory has
    an event of size 1.
    """
    index: Any = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    return tensor[(..., *index[tensor.dim() - event_dim :])]
