"""Weights that a net computes from its parameters: by parametrizations, or by hooks."""

from collections.abc import Container
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from pyro_structvi._torch import SpectralParametrization, forward_hooks, is_householder


def check_reparametrized(net: nn.Module, sampled: Container[int]) -> None:
    """Refuse parametrizations that are wrong for random parameters."""
    for name, module in net.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in sampled:
                continue
            for step in _steps_from(module, attribute):
                reason = None
                if isinstance(step, (SpectralParametrization, SpectralNorm)):
                    reason = (
                        "is under `spectral_norm`, which divides a draw by a norm that it estimated "
                        "from other draws. Remove it, with `remove_parametrizations` of "
                        "`torch.nn.utils.parametrize` or `torch.nn.utils.remove_spectral_norm`, or "
                        "freeze the weight"
                    )
                elif is_householder(step):
                    reason = (
                        "is under `orthogonal` by Householder reflections, which turns columns of a "
                        'draw into zeros. Pass `orthogonal_map="cayley"` or "matrix_exp" to '
                        "`orthogonal`"
                    )
                if reason:
                    full_name = f"{name}.{attribute}".removeprefix(".")
                    raise ValueError(f"The weight of the parameter '{full_name}' {reason}.")


def _steps_from(module: nn.Module, attribute: str) -> list[Any]:
    """Return the parametrizations, or hooks, that make a weight of a parameter."""
    if isinstance(module, ParametrizationList):
        return list(module)
    return [
        hook for hook in forward_hooks(module) if f"{getattr(hook, 'name', None)}_orig" == attribute
    ]


def computed_weights(net: nn.Module) -> dict[int, Tensor]:
    """Return what hooks have computed from parameters, as tensors that can be copied, by identity."""
    return {
        id(value): value.detach()
        for module in net.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
