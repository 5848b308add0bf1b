"""Frozen parameters: buffers in the memory of the net that was given, which no pass changes."""

from collections.abc import Iterator

from torch import Tensor, nn

_NAMES = "frozen_parameters"


def freeze(module: nn.Module, attribute: str) -> None:
    """Turn a parameter into a buffer with the same memory: Pyro's param store would thaw it."""
    parameter = getattr(module, attribute)
    is_usual = type(parameter) is nn.Parameter
    delattr(module, attribute)
    module.register_buffer(attribute, parameter.detach() if is_usual else parameter)
    if (
        not is_usual
    ):  # its class says how it is read, as in 4 bits; Pyro looks at what is no attribute
        module.__dict__[attribute] = parameter
    module.__dict__.setdefault(_NAMES, []).append(attribute)


def frozen_names(module: nn.Module) -> list[str]:
    """Return the attributes of a module that were frozen parameters."""
    names: list[str] = vars(module).get(_NAMES, [])
    return names


def buffers_that_change(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module, without those of its children, that a pass may change."""
    frozen = frozen_names(module)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in frozen:
            yield name, buffer
