"""Constants that a recorded step may depend on, so that it can omit terms that vanish."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from pyro_structvi._torch import inside_jit_trace, inside_transform, is_tracing
from pyro_structvi._torch_steps import found_tensors, not_recorded

LARGEST = 16  # elements of a tensor that is compared before each step


class TakenNumbers:
    """Small tensors whose values a recorded step depends on.

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
        """Keep the current values of a tensor's storage."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._taken:
            size = memory.nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((size,), (1,), 0)
            self._taken[memory.data_ptr()] = whole, whole.tolist()

    def are_as_taken(self) -> bool:
        """Whether all tensors still have these values."""
        return all(whole.tolist() == numbers for whole, numbers in self._taken.values())


_RECORD = ContextVar[TakenNumbers | None]("_RECORD", default=None)


@contextmanager
def taking(numbers: TakenNumbers) -> Iterator[None]:
    """Let a recorded block depend on values of tensors, which are then noted."""
    token = _RECORD.set(numbers)
    try:
        yield
    finally:
        _RECORD.reset(token)


def known_number(tensor: Tensor) -> float | None:
    """Return the value of a tensor of one element, or None if it may change between steps.

    In a recorded step, the value may depend on small tensors such as a prior's buffers. The record
    is valid while these are unchanged. The result is None for values on a GPU, and for values that
    depend on an input, a random number or a tensor that requires a gradient.
    """
    if torch.compiler.is_dynamo_compiling() or inside_transform() or inside_jit_trace():
        return None
    if tensor.requires_grad or tensor.numel() > 1 or tensor.device.type != "cpu":
        return None
    if not is_tracing():
        return float(tensor.item())
    record, found = _RECORD.get(), found_tensors(tensor)
    if record is None or found is None or any(_may_change(each) for each in found):
        return None
    with not_recorded():
        for each in found:
            record.take(each)
        return float(tensor.item())


def _may_change(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.requires_grad or tensor.device.type != "cpu" or storage > LARGEST
