"""Which parameters of a net belong to normalization, and to scales of layers."""

import re

from torch import nn

from pyro_structvi._torch import BatchOrInstanceNorm

_OF_TORCH = (BatchOrInstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NORM = re.compile("Norm(?!al)|LayerScale|GRN$")
_SCALE = re.compile(r"gamma_?\d*|lambda_?\d+|layer_scale\w*")


def normalization_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the own parameters of a module that normalize, or scale a whole layer.

    These are the parameters of torch's normalization layers; vectors of a class whose name says so, such
    as ``LlamaRMSNorm`` and ``LayerScale``; and vectors ``gamma``, ``layer_scale`` and ``lambda_1``, as
    ConvNeXt and vision transformers call the scales of their layers.

    A vector has one dimension larger than 1.
    """
    own = list(module.named_parameters(recurse=False, remove_duplicate=False))
    vectors = [(name, value) for name, value in own if max(value.shape, default=1) == value.numel()]
    if isinstance(module, _OF_TORCH):
        return [value for _, value in own]
    if len(vectors) == len(own) and any(
        _NORM.search(kind.__name__) for kind in type(module).__mro__
    ):
        return [value for _, value in own]
    return [value for name, value in vectors if _SCALE.fullmatch(name)]
