"""Orthogonal matrices from angles."""

import torch
from torch import Tensor

from pyro_structvi.linalg.matrices import identity_like
from pyro_structvi.linalg.precision import at_least_single


def num_angles(size: int, block_size: int) -> int:
    """Return the number of angles of :func:`block_rotation`."""
    return sum(each * (each - 1) // 2 for each in _blocks(size, block_size))


def block_rotation(angles: Tensor, size: int, block_size: int) -> Tensor:
    r"""Return an orthogonal matrix of diagonal blocks, the identity for zeros.

    A block is the Cayley transform :math:`(I + A)^{-1} (I - A)` of the skew-symmetric matrix A with half
    the angles below its diagonal. Small angles rotate by themselves.

    Args:
        angles: Real numbers, ``(num_angles(size, block_size),)``, block by block.
        size: The size n of the matrix.
        block_size: The size of all blocks but the last one.

    Returns:
        A matrix ``(n, n)`` of determinant 1.

    Example:
        >>> block_rotation(torch.tensor([2.0]), 3, 2)
        tensor([[ 0.,  1.,  0.],
                [-1.,  0.,  0.],
                [ 0.,  0.,  1.]])
    """
    sizes = _blocks(size, block_size)
    whole = sizes.count(block_size)
    split = whole * block_size * (block_size - 1) // 2
    blocks: list[Tensor] = []
    if whole:
        blocks += cayley(angles[:split].view(whole, split // whole), block_size)
    if whole < len(sizes):
        blocks.append(cayley(angles[split:], sizes[-1]))
    rotation: Tensor = torch.block_diag(*blocks)
    return rotation


def cayley(angles: Tensor, size: int) -> Tensor:
    """Return rotations ``(*batch, n, n)`` from angles ``(*batch, n (n - 1) / 2)``."""
    rows, columns = torch.tril_indices(size, size, offset=-1, device=angles.device)
    flat = angles.new_zeros(*angles.shape[:-1], size * size)
    lower = flat.index_copy(-1, rows * size + columns, angles / 2)
    lower = at_least_single(lower).view(*angles.shape[:-1], size, size)
    skew, identity = lower - lower.mT, identity_like(lower)
    rotation: Tensor = torch.linalg.solve(identity + skew, identity - skew)
    return rotation.to(angles.dtype)


def _blocks(size: int, block_size: int) -> list[int]:
    whole, rest = divmod(size, block_size)
    return [block_size] * whole + [rest] * bool(rest)
