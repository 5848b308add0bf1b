"""Images that are harder to classify: noise, blur, contrast, brightness, coarse pixels, JPEG."""

import hashlib
import math
from collections.abc import Callable
from io import BytesIO
from typing import Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur

Kind = Literal["gaussian_noise", "blur", "contrast", "brightness", "pixelate", "jpeg"]
CORRUPTIONS: tuple[str, ...] = get_args(Kind)
"""The kinds of :func:`corrupt`."""

# By severity, those of CIFAR-10-C (Hendrycks and Dietterich 2019).
LEVELS = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # share of the contrast that is left
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # what the value gains
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # share of the rows and columns left
    "jpeg": (80, 65, 58, 50, 40),  # quality
}


def corrupt(images: Tensor, kind: Kind, severity: int, seed: int = 0) -> Tensor:
    """Make images harder to classify.

    =================== ================================================================================
    ``gaussian_noise``  adds independent normal noise to each number
    ``blur``            averages with normal weights; the image is reflected at its edges
    ``contrast``        moves each number toward the mean of its channel
    ``brightness``      adds to the largest channel, and keeps hue and saturation
    ``pixelate``        takes fewer pixels, and repeats some of them (Pillow's box filter)
    ``jpeg``            rounds to 8 bits, compresses and decompresses
    =================== ================================================================================

    The levels are those of CIFAR-10-C, for images of about 32 pixels. Blur counts in pixels, so larger
    images are blurred less. The distance from the clean images grows with the severity on average; a
    single image may be an exception for ``"pixelate"`` and ``"jpeg"``. An image is changed in the same
    way whether it is alone or in a batch, up to rounding: noise is drawn from the seed and the image.
    The global random state is neither used nor changed.

    Args:
        images: ``(N, C, H, W)``, real numbers from 0 to 1; ``"jpeg"`` takes 1 channel or 3.
        kind: One of :data:`CORRUPTIONS`.
        severity: From 1, little, to 5, much.
        seed: Of the noise; the same at each severity, which scales it.

    Returns:
        New images of the same shape, dtype and device, in the same range.

    References:
        Hendrycks and Dietterich (2019), "Benchmarking neural network robustness to common corruptions
        and perturbations".
    """
    clean, level = images.double(), LEVELS[kind][severity - 1]
    changed = (
        _noisy(clean, level, seed) if kind == "gaussian_noise" else _BY_KIND[kind](clean, level)
    )
    return changed.clamp(0, 1).to(images.dtype)


def _noisy(images: Tensor, level: float, seed: int) -> Tensor:
    noise = torch.stack([_noise_of(image, seed) for image in _as_bytes(images)])
    return images + level * noise.to(images.device)


def _noise_of(image: Tensor, seed: int) -> Tensor:
    """Draw standard normal noise by a seed of its own for each image, on any device the same."""
    text = str(seed).encode() + b" " + image.numpy().tobytes()
    key = hashlib.blake2b(text, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    return torch.randn(image.shape, generator=generator, dtype=torch.double)


def _blurred(images: Tensor, level: float) -> Tensor:
    reach = math.ceil(4 * level)  # beyond 4 standard deviations there is nothing to see
    height, width = (2 * min(reach, size - 1) + 1 for size in images.shape[-2:])
    channels = images.flatten(0, 1).unsqueeze(1)
    # One direction after the other, a third of the time.
    across: Tensor = gaussian_blur(channels, [width, 1], [level, level])
    both: Tensor = gaussian_blur(across, [1, height], [level, level])
    return both.reshape(images.shape)


def _with_less_contrast(images: Tensor, level: float) -> Tensor:
    return images.mean((-2, -1), keepdim=True).lerp(images, level)


def _brighter(images: Tensor, level: float) -> Tensor:
    value = images.amax(-3, keepdim=True)
    more = (value + level).clamp_max(1)
    return torch.where(value > 0, images * (more / value), more)


def _pixelated(images: Tensor, level: float) -> Tensor:
    full = tuple(reversed(images.shape[-2:]))
    fewer = tuple(max(1, int(level * size)) for size in full)
    box = Image.Resampling.BOX

    def coarser(channel: Tensor) -> Tensor:
        image = Image.fromarray(channel.numpy())
        return torch.from_numpy(np.array(image.resize(fewer, box).resize(full, box)))

    channels = images.flatten(0, 1).float().cpu()
    changed = torch.stack([coarser(channel) for channel in channels])
    return changed.to(images).reshape(images.shape)


def _compressed(images: Tensor, level: float) -> Tensor:

    def through_file(image: Tensor) -> Tensor:
        file = BytesIO()
        array = image.squeeze(0) if len(image) == 1 else image.movedim(0, -1)
        Image.fromarray(array.numpy()).save(file, "JPEG", quality=int(level))
        array = torch.from_numpy(np.array(Image.open(file)))
        return array.unsqueeze(0) if len(image) == 1 else array.movedim(-1, 0)

    decoded = torch.stack([through_file(image) for image in _as_bytes(images)])
    return decoded.to(images.device).double() / 255


_BY_KIND: dict[str, Callable[[Tensor, float], Tensor]] = {
    "blur": _blurred,
    "contrast": _with_less_contrast,
    "brightness": _brighter,
    "pixelate": _pixelated,
    "jpeg": _compressed,
}


def _as_bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8).cpu()
