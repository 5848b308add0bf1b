"""Restoration of tensors and random generators."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved(
    tensors: Iterable[Tensor], generators: Iterable[torch.Generator] = ()
) -> Callable[[], None]:
    """Return a function that puts the present values back."""
    copies = [(each, each.detach().clone()) for each in tensors if _can_be_written(each)]
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for generator, state in states:
            generator.set_state(state)

    return restore


def _can_be_written(tensor: Tensor) -> bool:
    """Whether operations may write: not into inference tensors or several elements in one place."""
    if tensor.is_inference() or tensor.layout != torch.strided:
        return not tensor.is_inference()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(size > 1 and stride == 0 for size, stride in pairs)
