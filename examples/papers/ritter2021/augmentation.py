"""Images that are shifted and flipped at random, anew in each epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

MARGIN = 4


class ShiftedAndFlipped:
    """Mini-batches of images, each shifted by up to four pixels and turned left to right half the time.

    Args:
        x: Images ``(N, C, H, W)``.
        y: Labels ``(N,)``.
        batch_size: Examples of a mini-batch.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self) -> int:
        """Count the mini-batches of an epoch."""
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the images in random order."""
        for chosen in torch.randperm(len(self.x)).split(self.batch_size):
            yield changed(self.x[chosen]), self.y[chosen]


def changed(images: Tensor) -> Tensor:
    """Shift and flip each image ``(N, C, H, W)``; what comes in at an edge is reflected."""
    count, channels, *sides = images.shape
    padded = F.pad(images, (MARGIN,) * 4, mode="reflect")
    rows, columns = (
        torch.arange(side) + torch.randint(2 * MARGIN + 1, (count, 1)) for side in sides
    )
    flips = torch.rand(count) < 0.5
    columns = torch.where(flips[:, None], columns.flip(-1), columns)
    each, every = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[each, every, rows[:, None, :, None], columns[:, None, None, :]]
