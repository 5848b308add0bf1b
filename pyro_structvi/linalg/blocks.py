"""Blocks of rows that stay in a CPU's cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

BLOCK = 2**18  # numbers

_IN_ONE: ContextVar[bool] = ContextVar("in_one", default=False)


@contextmanager
def rows_in_one() -> Iterator[None]:
    """Let rows be one block in this code, for a compiler that makes blocks of its own."""
    token = _IN_ONE.set(True)
    try:
        yield
    finally:
        _IN_ONE.reset(token)


def blocks_of_rows(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    """Split ``rows (*batch, n, k)`` so that a block of them by ``width`` stays in a CPU's cache."""
    if rows.device.type != "cpu" or _IN_ONE.get():
        return (rows,)
    blocks: tuple[Tensor, ...] = rows.split(max(1, BLOCK // max(1, width)), dim=-2)
    return blocks
