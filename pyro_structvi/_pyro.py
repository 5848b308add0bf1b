"""The vectorized plates that Pyro's objectives and ``Predictive`` put around a model or a guide."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Size

_FIRST: ContextVar[int] = ContextVar("first", default=0)


def plates_around() -> Size:
    """Return the sizes of the vectorized plates around a model, but for that of its data, at dim -1."""
    handlers = _PYRO_STACK[_FIRST.get() :]
    frames = [handler for handler in handlers if isinstance(handler, IndepMessenger)]
    dims = {frame.dim: frame.size for frame in frames if frame.dim is not None and frame.dim < -1}
    return Size([dims.get(dim, 1) for dim in range(min(dims, default=-1), -1)])


@contextmanager
def outside_plates() -> Iterator[None]:
    """Let a block, in which ``poutine.block`` hides all from Pyro's handlers, not see the plates."""
    token = _FIRST.set(len(_PYRO_STACK))
    try:
        yield
    finally:
        _FIRST.reset(token)
