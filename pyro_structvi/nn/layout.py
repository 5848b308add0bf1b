"""How a parameter meets the inputs of its module: over how many terms an output sums."""

import math
from dataclasses import dataclass

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layout:
    """How a parameter meets inputs.

    Attributes:
        fan_in: Over how many terms an output sums; 0 for what multiplies no input, such as a bias; None
            where it cannot be known.
        input_dim: The dimension that counts input channels; None where there is none, or none is known.
        groups: In how many groups the input channels come, each with outputs of its own.
    """

    fan_in: float | None = None
    input_dim: int | None = None
    groups: int = 1


def layout_of(module: nn.Module, attribute: str, shape: torch.Size) -> Layout:
    """Return how a parameter meets the inputs of its module.

    A transposed convolution keeps its weight as ``(in, out / groups, *kernel)``, and an output sums over
    the taps that reach it, which a stride makes fewer. An output of an embedding is one term, of its
    row. A ``Conv1D``, as in GPT-2, has ``(in, out)`` and the attribute ``nf``. Any other matrix is
    ``(out, in)``. Of more dimensions in modules that are none of torch's, as of stacked experts, nothing
    is known; but what begins with a dimension of size 1, as tokens and positions do, meets a batch, and
    no inputs.
    """
    if len(shape) < 2:
        return Layout(fan_in=0)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Layout(fan_in=1, input_dim=0)
    if isinstance(module, _TRANSPOSED):
        taps = (max(k / s, 1) for k, s in zip(shape[2:], module.stride, strict=True))
        return Layout(shape[0] // module.groups * math.prod(taps), input_dim=0)
    if isinstance(module, _CONVOLUTIONS):
        return Layout(shape[1:].numel(), input_dim=1, groups=module.groups)
    if len(shape) == 2 and getattr(module, "nf", None) == shape[1]:
        return Layout(shape[0], input_dim=0)
    if len(shape) == 2 or isinstance(module, nn.Bilinear):
        return Layout(shape[1:].numel(), input_dim=1)
    return Layout(fan_in=0) if shape[0] == 1 else Layout()


def parametrized(net: nn.Module) -> dict[int, nn.Module]:
    """Return the modules whose weights are computed, by the identity of what keeps their parameters."""
    return {
        id(own): module
        for module in net.modules()
        if nn.utils.parametrize.is_parametrized(module)
        for own in module.parametrizations.values()  # type: ignore[operator]
    }


def find_layouts(net: nn.Module) -> dict[int, Layout]:
    """Return the layouts of a net's parameters, by identity.

    Of a parameter with several uses it is that with the largest fan-in: a table of words that is the
    last layer too is a matrix ``(out, in)``.
    """
    found: dict[int, Layout] = {}
    computed = parametrized(net)
    for module in net.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            own = layout_of(computed.get(id(module), module), attribute, parameter.shape)
            known = found.get(id(parameter), own)
            is_larger = (own.fan_in or 0) > (known.fan_in or 0)
            found[id(parameter)] = own if is_larger else known
    return found
