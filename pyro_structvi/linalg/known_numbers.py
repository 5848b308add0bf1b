"""Numbers known while a step is recorded, by which it can leave out what comes to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from pyro_structvi._torch import inside_jit_trace, inside_transform, is_recording

LARGEST = 16  # numbers in a tensor that is compared before each step


class TakenNumbers:
    """Tensors whose numbers a recorded step has been built on.

    Example:
        >>> scale = torch.tensor([0.5])
        >>> taken = TakenNumbers()
        >>> taken.take(scale)
        >>> taken.are_as_taken()
        True
        >>> _ = scale.fill_(2.0)
        >>> taken.are_as_taken()
        False
    """

    def __init__(self) -> None:
        self._taken: dict[int, tuple[Tensor, list[float]]] = {}

    def take(self, tensor: Tensor) -> None:
        """Keep the numbers that are now in the memory of a small tensor."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._taken:
            size = memory.nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((size,), (1,), 0)
            self._taken[memory.data_ptr()] = whole, whole.tolist()

    def are_as_taken(self) -> bool:
        """Whether each tensor still has its numbers."""
        return all(whole.tolist() == numbers for whole, numbers in self._taken.values())


_RECORD = ContextVar[TakenNumbers | None]("_RECORD", default=None)


@contextmanager
def taking(numbers: TakenNumbers) -> Iterator[None]:
    """Let what is recorded in a block be built on numbers of tensors, which are then noted."""
    token = _RECORD.set(numbers)
    try:
        yield
    finally:
        _RECORD.reset(token)


def known_number(tensor: Tensor) -> float | None:
    """Return the number in a tensor of one element, or None where it may be another next time.

    Where a step is recorded to be repeated, that is wherever the number depends on an input, a random
    number or a tensor that takes a gradient. It depends then on small tensors such as a prior's buffers,
    and the record holds as long as these stay. Numbers on a device are not waited for.
    """
    if torch.compiler.is_dynamo_compiling() or inside_transform() or inside_jit_trace():
        return None
    if tensor.requires_grad or tensor.numel() > 1 or tensor.device.type != "cpu":
        return None
    if not is_recording():
        return float(tensor.item())
    return None
