"""Restoration of tensors and random generators."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved(
    tensors: Iterable[Tensor], generators: Iterable[torch.Generator] = ()
) -> Callable[[], None]:
    """Return a function that puts the present values back."""
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for generator, state in states:
            generator.set_state(state)

    return restore
