"""What guide and model are made of, to be kept and put back: parameters, buffers, extra states."""

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi._checks import brief, shape_text
from pyro_structvi.sites.family import KEY, check_options

MOST_NAMED = 3


def parts_of(loss: nn.Module) -> dict[str, nn.Module]:
    """Return guide and model of a loss, those that are modules."""
    children = dict(loss.named_children())
    return {name: children[name] for name in ("guide", "model") if name in children}


def parts_state(loss: nn.Module, copy: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the state dicts of ``guide`` and ``model`` and, by ``buffers``, what these leave out.

    Args:
        loss: The loss of guide and model.
        copy: From a name and a state to what is kept of it.
    """
    state: dict[str, Any] = {"guide": None, "model": None, "buffers": {}}
    for name, part in parts_of(loss).items():
        own = part.state_dict()
        # Steps may change buffers that are not persistent, too.
        others = {key: value for key, value in part.named_buffers() if key not in own}
        state[name] = copy(name, dict(own))
        state["buffers"][name] = copy(name, others)
    return state


def load_parts(loss: nn.Module, state: Mapping[str, Any]) -> None:
    """Put guide and model into a state that ``parts_state`` returned."""
    for name, part in parts_of(loss).items():
        part.load_state_dict(state[name])
        buffers = dict(part.named_buffers())
        with torch.no_grad():
            for key, value in state["buffers"][name].items():
                if key in buffers:
                    buffers[key].copy_(value)


def cloned(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of its tensors, on their devices."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def check_parts(loss: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise unless a state has exactly the tensors of guide and model, which do not change.

    Raises:
        RuntimeError: If families have other options.
        ValueError: If names, shapes or dtypes differ.
    """
    for name, part in parts_of(loss).items():
        _check_part(name, part, state[name] or {})


def _check_part(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    check_options(module, saved, "")
    differences = [*_differences(module.state_dict(), saved)]
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
