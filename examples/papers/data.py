"""Images for the papers' experiments: downloaded by torchvision, or read from a file."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    """Pixels from 0 to 1, ``(examples, channels, height, width)``, and labels."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def load_images(name: str, path: Path | None = None, limit: int | None = None) -> Images:
    """Return the images of a data set.

    Args:
        name: One of torchvision, ``"MNIST"`` or ``"CIFAR10"``, which is downloaded into ``data/``.
        path: An ``.npz`` file instead, with unsigned bytes ``x_train, y_train, x_test, y_test``, the
            channels last.
        limit: Use only so many examples of each part, to try things out.
    """
    arrays = dict(np.load(path)) if path else downloaded(name)
    parts = []
    for part in ("train", "test"):
        x = torch.from_numpy(arrays[f"x_{part}"][:limit])
        x = x[:, None] if x.dim() == 3 else x.movedim(-1, 1)
        parts += [x.float() / 255, torch.from_numpy(arrays[f"y_{part}"][:limit]).long()]
    return Images(*parts)


def downloaded(name: str) -> dict[str, np.ndarray]:
    """Return torchvision's arrays."""
    import torchvision.datasets

    arrays = {}
    for part in ("train", "test"):
        data = getattr(torchvision.datasets, name)("data", train=part == "train", download=True)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.asarray(data.data), np.asarray(data.targets)
    return arrays
