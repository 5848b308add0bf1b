"""Numbers for each channel of a layer: one set for all examples, or one set for each."""

from collections.abc import Callable

from torch import Tensor, nn

from pyro_structvi._checks import check, shape_text
from pyro_structvi._torch import forward_hooks
from pyro_structvi.maps.calls import drawn_per_example


@drawn_per_example
def scale_channels(x: Tensor, scale: Tensor, channel_dim: int) -> Tensor:
    """Multiply each channel by its number, the same at all positions of an example.

    Args:
        x: Inputs or outputs of a layer, with one batch dimension.
        scale: Numbers ``(channels,)``, or ``(batch, channels)``.
        channel_dim: The dimension of ``x`` that holds the channels, counted from the right.

    Returns:
        The products, of the shape of ``x``.
    """
    return x * _meet_channels(scale, x, channel_dim)


@drawn_per_example
def shift_channels(x: Tensor, shift: Tensor, channel_dim: int) -> Tensor:
    """Add its number to each channel, as :func:`scale_channels` multiplies by it."""
    return x + _meet_channels(shift, x, channel_dim)


def with_batch_dim(function: Callable[[Tensor], Tensor], x: Tensor, example_dim: int) -> Tensor:
    """Call a function of a batch with ``x``, or with ``x`` as the only example of one.

    Args:
        function: The function.
        x: A batch, or a single example.
        example_dim: How many dimensions an example has at least.

    Returns:
        The outputs, without the batch dimension if ``x`` has none.
    """
    if x.dim() == example_dim:
        return function(x.unsqueeze(0)).squeeze(0)
    return function(x)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer does no more than its class does, so that another can take its place."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    return "weight" in names <= {"weight", "bias"} and not forward_hooks(layer)


def _meet_channels(factor: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Shape ``factor (*batch, channels)`` so that it broadcasts with ``x``."""
    before = [1 for _ in range(x.dim() + channel_dim - 1)]
    after = [1 for _ in range(-channel_dim - 1)]
    return factor.reshape(*factor.shape[:-1], *before, factor.shape[-1], *after)


def check_channels(x: Tensor, channels: int, channel_dim: int) -> None:
    """Raise a ``ValueError`` unless the input of a layer has the channels that it takes."""
    check("x", x, Tensor)
    if x.dim() < -channel_dim or x.shape[channel_dim] != channels:
        raise ValueError(
            f"`x` must have {channels} channels in its dimension {channel_dim}, but got the shape "
            f"{shape_text(x.shape)}."
        )
