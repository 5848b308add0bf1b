"""What modules are made of, as copies that can be put back: parameters, buffers, extra states."""

from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi._checks import brief, shape_text
from pyro_structvi.families.saved_options import KEY, check_options

MOST_NAMED = 3


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict and, by ``buffers``, what that leaves out.

    Args:
        module: The module. Buffers that are not persistent are kept too, since steps may change them.
    """
    state = module.state_dict()
    others = {name: value for name, value in module.named_buffers() if name not in state}
    return {"state": dict(state), "buffers": others}


def load_module_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a module into a state that ``module_state`` returned."""
    module.load_state_dict(saved["state"])
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in saved["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)


def check_module_state(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` unless a saved state has exactly a module's tensors.

    Args:
        name: What the module is, for the error.
        module: The module; it does not change.
        saved: What ``module_state`` returned.

    Raises:
        RuntimeError: If families have other options.
        ValueError: If names, shapes or dtypes differ.
    """
    check_options(module, saved["state"], "")
    differences = [*_differences(module.state_dict(), saved["state"])]
    if differences:
        more = len(differences) - MOST_NAMED
        raise ValueError(
            f"`checkpoint` must be of a {name} with the same parameters and buffers, but "
            f"{'; '.join(differences[:MOST_NAMED])}{f'; and {more} more' if more > 0 else ''}. Make the "
            f"{name} as it was then, or give another path."
        )


def _differences(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*own, *saved]):
        texts = [_kind_of(state[name]) if name in state else "missing" for state in (own, saved)]
        if texts[0] != texts[1] and not (name.endswith(KEY) and name in own and name in saved):
            yield f"'{name}' is {texts[0]} here and {texts[1]} there"


def _kind_of(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{shape_text(value.shape)} of {value.dtype}" if is_tensor else brief(value)


def plain(name: str, value: Any) -> Any:
    """Return a value with tensors on the host, as ``torch.load(..., weights_only=True)`` can read it.

    Args:
        name: What it belongs to, for the error.
        value: Numbers, texts, tensors, and lists, tuples and dicts of them.

    Raises:
        TypeError: If it holds anything else.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(name, key): plain(name, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(name, each) for each in value)
    raise TypeError(
        f"`{name}` must have a state of tensors, numbers and texts for a checkpoint, but it holds "
        f"{brief(value)}. Leave `checkpoint` out, or keep it elsewhere."
    )
