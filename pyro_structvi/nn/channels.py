"""Parts shared by rank-1 and Walsh-Hadamard layers."""

from collections.abc import Callable

from torch import Tensor, nn

from pyro_structvi._checks import check, naming, shape_text
from pyro_structvi._torch import forward_hooks
from pyro_structvi.maps.calls import drawn_per_example


@drawn_per_example
def scale_channels(x: Tensor, scale: Tensor, channel_dim: int) -> Tensor:
    """Multiply each channel by a number."""
    return x * _to_channels(scale, x, channel_dim)


@drawn_per_example
def shift_channels(x: Tensor, shift: Tensor, channel_dim: int) -> Tensor:
    """Add a number to each channel; arguments as for :func:`scale_channels`."""
    return x + _to_channels(shift, x, channel_dim)


def _to_channels(factor: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Reshape ``factor (*batch, channels)`` so that it broadcasts with ``x``."""
    before = [1 for _ in range(x.dim() + channel_dim - 1)]
    after = [1 for _ in range(-channel_dim - 1)]
    return factor.reshape(*factor.shape[:-1], *before, factor.shape[-1], *after)


def apply_to_batch(
    function: Callable[[Tensor], Tensor], x: Tensor, channels: int, channel_dim: int
) -> Tensor:
    """Call a function of a batch with ``x``, a batch or a single example."""
    check("x", x, Tensor)
    if x.dim() < -channel_dim or x.shape[channel_dim] != channels:
        raise ValueError(
            f"`x` must have {channels} channels in its dimension {channel_dim}, but got the shape "
            f"{shape_text(x.shape)}."
        )
    with naming("x", x):
        return function(x.unsqueeze(0)).squeeze(0) if x.dim() == -channel_dim else function(x)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer has no hooks or extra parameters, so that it can be replaced."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    return "weight" in names <= {"weight", "bias"} and not forward_hooks(layer)
