"""The columns of a Gaussian weight's factor: what each number of its noise does."""

from typing import Any

import torch
from torch import Tensor


def noise_columns(q: Any) -> Tensor:
    """Return the columns of ``A``, ``(noise, *batch_shape, *event_shape)``; for small sizes."""
    size, like = q.noise_shape.numel(), q._first_parameter
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    noise = unit.reshape(size, *(1 for _ in q.batch_shape), *q.noise_shape)
    columns: Tensor = q.scale_noise(noise.expand(size, *q.batch_shape, *q.noise_shape))
    return columns
