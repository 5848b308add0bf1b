"""Images that are harder to classify: noise, blur, contrast, brightness, coarse pixels, JPEG."""

import hashlib
import math
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import Rule, Whole, brief, check, checked

Kind = Literal["gaussian_noise", "blur", "contrast", "brightness", "pixelate", "jpeg"]
Severity = Annotated[int, Rule("a whole number from 1 to 5", lambda value: 1 <= value <= 5)]
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


@checked
def corrupt(images: Tensor, kind: Kind, severity: Severity, seed: Whole = 0) -> Tensor:
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
        images: ``(N, C, H, W)`` or ``(C, H, W)``, real numbers from 0 to 1, or ``uint8``; at least 2
            pixels high and wide. ``"jpeg"`` takes 1 channel or 3.
        kind: One of :data:`CORRUPTIONS`.
        severity: From 1, little, to 5, much.
        seed: Of the noise; the same at each severity, which scales it.

    Returns:
        New images of the same shape, dtype and device, in the same range.

    Raises:
        ImportError: For ``"blur"`` without torchvision; for ``"pixelate"`` and ``"jpeg"`` without
            Pillow.
        TypeError: If images are neither real numbers nor ``uint8``.
        ValueError: If images are beyond 0 and 1 or have another shape, or for an unknown kind or
            severity.

    Example:
        >>> image = torch.full((3, 32, 32), 0.5)
        >>> corrupt(image, "gaussian_noise", severity=5).std() > 0.09
        tensor(True)

    References:
        Hendrycks and Dietterich (2019), "Benchmarking neural network robustness to common corruptions
        and perturbations".
    """
    _check_images(images, kind)
    is_bytes = images.dtype == torch.uint8
    clean = images.detach().double().reshape(-1, *images.shape[-3:]) / (255 if is_bytes else 1)
    level = LEVELS[kind][severity - 1]
    changed = (
        _noisy(clean, level, seed) if kind == "gaussian_noise" else _BY_KIND[kind](clean, level)
    )
    changed = changed.clamp(0, 1).reshape(images.shape)
    return (changed * 255).round().to(torch.uint8) if is_bytes else changed.to(images.dtype)


def _check_images(images: Tensor, kind: str) -> None:
    check("images", images, Tensor)
    is_bytes = images.dtype == torch.uint8
    if images.is_meta or not (is_bytes or images.is_floating_point()):
        raise TypeError(
            f"`images` must hold real numbers from 0 to 1, or uint8, but got {brief(images)}."
        )
    if images.dim() not in (3, 4) or not images.numel() or min(images.shape[-2:]) < 2:
        raise ValueError(
            "`images` must have shape (N, C, H, W) or (C, H, W), with at least 2 pixels in height and "
            f"width, but got {brief(images)}."
        )
    if kind == "jpeg" and images.shape[-3] not in (1, 3):
        raise ValueError(f'`images` must have 1 channel or 3 for "jpeg", but got {brief(images)}.')
    if not is_bytes and not bool(((images >= 0) & (images <= 1)).all()):  # NaN too
        raise ValueError(
            "`images` must be from 0 to 1 everywhere, but are not. Corrupt images before they are "
            "normalized, or write `images.clamp(0, 1)` where rounding went beyond."
        )


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
    blur = _library("torchvision.transforms.v2.functional", "blur", "torchvision").gaussian_blur
    reach = math.ceil(4 * level)  # beyond 4 standard deviations there is nothing to see
    height, width = (2 * min(reach, size - 1) + 1 for size in images.shape[-2:])
    channels = images.flatten(0, 1).unsqueeze(1)
    # One direction after the other, a third of the time.
    across: Tensor = blur(channels, [width, 1], [level, level])
    both: Tensor = blur(across, [1, height], [level, level])
    return both.reshape(images.shape)


def _with_less_contrast(images: Tensor, level: float) -> Tensor:
    return images.mean((-2, -1), keepdim=True).lerp(images, level)


def _brighter(images: Tensor, level: float) -> Tensor:
    value = images.amax(-3, keepdim=True)
    more = (value + level).clamp_max(1)
    return torch.where(value > 0, images * (more / value), more)


def _pixelated(images: Tensor, level: float) -> Tensor:
    pillow = _library("PIL.Image", "pixelate", "Pillow")
    full = tuple(reversed(images.shape[-2:]))
    fewer = tuple(max(1, int(level * size)) for size in full)
    box = pillow.Resampling.BOX

    def coarser(channel: Tensor) -> Tensor:
        image = pillow.fromarray(channel.numpy())
        return torch.from_numpy(np.array(image.resize(fewer, box).resize(full, box)))

    channels = images.flatten(0, 1).float().cpu()
    changed = torch.stack([coarser(channel) for channel in channels])
    return changed.to(images).reshape(images.shape)


def _compressed(images: Tensor, level: float) -> Tensor:
    open_image = _library("PIL.Image", "jpeg", "Pillow")

    def through_file(image: Tensor) -> Tensor:
        file = BytesIO()
        array = image.squeeze(0) if len(image) == 1 else image.movedim(0, -1)
        open_image.fromarray(array.numpy()).save(file, "JPEG", quality=int(level))
        array = torch.from_numpy(np.array(open_image.open(file)))
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


def _library(module: str, kind: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f'`kind="{kind}"` needs {name}. Install it by `pip install "pyro-structvi[examples]"`.'
        ) from error
