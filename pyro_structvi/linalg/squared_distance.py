"""The squared distance of a posterior's mean from the prior's."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_transform
from pyro_structvi.linalg.blocks import blocks_of_rows
from pyro_structvi.linalg.shapes import event_sum


def squared_distance(mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
    """Return ``|mean - loc|^2`` over an event, ``(*batch,)``; ``loc`` broadcasts to the mean."""
    if inside_transform():
        return event_sum((mean - loc).square(), event_dim)
    distance: Tensor = SquaredDistance.apply(mean, loc, event_dim)
    return distance


class SquaredDistance(torch.autograd.Function):
    """``|mean - loc|^2`` over an event, with a gradient of one pass over the mean."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
        """Add up the squares; torch's norm would lose digits in single precision."""
        ctx.event_dim = event_dim
        ctx.save_for_backward(mean, loc)
        ctx.save_for_forward(mean, loc)
        if loc.numel() > 1 or mean.dim() > event_dim:
            difference = mean - loc
            return event_sum(difference.mul_(difference), event_dim)
        differences = (
            block - loc.reshape(1, 1) for block in blocks_of_rows(mean.reshape(-1, 1), 1)
        )
        return reduce(torch.add, (each.mul_(each).sum() for each in differences))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return ``2 (mean - loc)``, and what is its opposite for ``loc``."""
        mean, loc = ctx.saved_tensors
        twice = 2 * gradient.reshape((*gradient.shape, *(1 for _ in range(ctx.event_dim))))
        of_mean = torch.addcmul(-twice * loc, mean, twice)
        of_loc = -of_mean.sum_to_size(loc.shape) if ctx.needs_input_grad[1] else None
        return of_mean, of_loc, None

    @staticmethod
    def jvp(ctx: Any, of_mean: Tensor | None, of_loc: Tensor | None, _: None) -> Tensor:
        """Return ``2 (mean - loc)`` times the difference of the tangents."""
        mean, loc = ctx.saved_tensors
        tangent = torch.zeros_like(mean) if of_mean is None else of_mean
        if of_loc is not None:
            tangent = tangent - of_loc
        return event_sum(2 * (mean - loc) * tangent, ctx.event_dim)
