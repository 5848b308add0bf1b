"""States of modules and of random generators: their values for a checkpoint, and training mode."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._checks import brief
from pyro_structvi._pyro import declared_samples
from pyro_structvi._torch import own_tensors


def parts_state(loss: nn.Module, copy: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the state dicts of ``guide`` and ``model`` and, by ``buffers``, what these leave out.

    Args:
        loss: The loss of guide and model.
        copy: From a name and a state to what is kept of it.
    """
    state: dict[str, Any] = {"guide": None, "model": None, "buffers": {}}
    for name, part in _parts_of(loss).items():
        own = part.state_dict()
        # Steps may change buffers that are not persistent, too.
        others = {key: value for key, value in part.named_buffers() if key not in own}
        state[name] = copy(name, dict(own))
        state["buffers"][name] = copy(name, others)
    return state


def load_parts(loss: nn.Module, state: Mapping[str, Any]) -> None:
    """Put guide and model into a state that ``parts_state`` returned, both or, on an error, neither."""
    before = parts_state(loss, cloned)
    try:
        _load_parts(loss, state)
    except Exception:
        _load_parts(loss, before)
        raise


def _load_parts(loss: nn.Module, state: Mapping[str, Any]) -> None:
    for name, part in _parts_of(loss).items():
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


def plain(name: str, value: Any) -> Any:
    """Return a value with tensors on the host, as ``torch.load(..., weights_only=True)`` can read it.

    Args:
        name: The owner of the value, for the error.
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


def random_states(device: torch.device | None) -> dict[str, Any]:
    """Return the states of the generators of torch, Python and NumPy, and of a GPU.

    Args:
        device: The guide's device.
    """
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002, the one that data sets share
    of_numpy = numpy | {"state": numpy["state"] | {"key": numpy["state"]["key"].tolist()}}
    gpu = device if device is not None and device.type == "cuda" else None
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": of_numpy,
        "gpu": None if gpu is None else torch.cuda.get_rng_state(gpu),
    }


def set_random_states(states: Mapping[str, Any], device: torch.device | None) -> None:
    """Put generators back into states that ``random_states`` returned."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])  # noqa: NPY002
    if states["gpu"] is not None and device is not None:
        torch.cuda.set_rng_state(states["gpu"], device)


@contextmanager
def training_mode(model: Callable[..., Any], guide: nn.Module) -> Iterator[None]:
    """Put model and guide into training mode in this block, but for frozen parts in evaluation mode."""
    roots = [root for root in (poutine.unwrap(model), guide) if isinstance(root, nn.Module)]
    modes = [(part, part.training) for root in roots for part in root.modules()]
    try:
        for root in roots:
            _put_into_training(root)
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _put_into_training(module: nn.Module) -> None:
    if not module.training and _is_frozen(module):
        return
    module.training = True
    for child in module.children():
        _put_into_training(child)


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has tensors, and none that is trained or sampled."""
    parts = [*module.modules()]
    has_tensors = any(True for part in parts for _ in own_tensors(part))
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    return has_tensors and not is_trained and not any(map(declared_samples, parts))


def _parts_of(loss: nn.Module) -> dict[str, nn.Module]:
    """Return guide and model of a loss, those that are modules."""
    children = dict(loss.named_children())
    return {name: children[name] for name in ("guide", "model") if name in children}
