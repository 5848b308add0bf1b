"""The states of the random generators of a process: torch's, Python's and NumPy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def host_states() -> dict[str, Any]:
    """Return the states of the global generators of the host, as tensors, numbers and lists."""
    of_numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002, the one that data sets share
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": _without_arrays(of_numpy),
    }


def set_host_states(states: dict[str, Any]) -> None:
    """Put the global generators of the host back into states that ``host_states`` returned."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])  # noqa: NPY002


def random_states(device: torch.device | None) -> dict[str, Any]:
    """Return the states of the host's generators, and of the GPU's that is used.

    Args:
        device: The guide's device.
    """
    gpu = _gpu(device)
    return host_states() | {"gpu": None if gpu is None else torch.cuda.get_rng_state(gpu)}


def set_random_states(states: dict[str, Any], device: torch.device | None) -> None:
    """Put generators back into states that ``random_states`` returned."""
    set_host_states(states)
    gpu = _gpu(device)
    if gpu is not None and states["gpu"] is not None:
        torch.cuda.set_rng_state(states["gpu"], gpu)


@contextmanager
def unchanged_randomness(device: torch.device | None) -> Iterator[None]:
    """Put the generators back after this block, whatever it draws."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states, device)


def _gpu(device: torch.device | None) -> torch.device | None:
    if device is not None and device.type == "cuda":
        return device
    is_used = device is None and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if is_used else None


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
