"""Blocks of rows that stay in a CPU's cache."""

from torch import Tensor

from pyro_structvi._torch import is_tracing

BLOCK = 2**18  # numbers


def blocks_of_rows(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    """Split ``rows (*batch, n, k)`` so that a block of them by ``width`` stays in a CPU's cache."""
    if rows.device.type != "cpu" or is_tracing():
        return (rows,)
    blocks: tuple[Tensor, ...] = rows.split(max(1, BLOCK // max(1, width)), dim=-2)
    return blocks
