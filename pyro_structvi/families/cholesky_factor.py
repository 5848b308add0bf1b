"""A Cholesky factor by unconstrained parameters, as families of correlated normals hold it."""

import math

import torch
from torch import Tensor


def initial_factor(size: int, scale: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameters of ``scale`` times the identity, of the dtype and device of ``like``."""
    return like.new_full((size,), math.log(scale)), like.new_zeros(size * (size - 1) // 2)


def cholesky_factor(log_diagonal: Tensor, lower: Tensor) -> Tensor:
    """Return the lower triangular matrix that the parameters hold.

    Args:
        log_diagonal: Logarithms of the diagonal, ``(n,)``.
        lower: The entries below it, row by row and as multiples of the row's diagonal entry,
            ``(n (n - 1) / 2,)``. As multiples, one learning rate serves rows of any size.

    Returns:
        A matrix ``(n, n)`` with a positive diagonal.

    Example:
        >>> cholesky_factor(torch.tensor([1.0, 2.0]).log(), torch.tensor([3.0]))
        tensor([[1., 0.],
                [6., 2.]])
    """
    size, device = log_diagonal.shape[0], log_diagonal.device
    rows, columns = torch.tril_indices(size, size, offset=-1, device=device)
    identity = torch.eye(size, dtype=lower.dtype, device=device)
    multiples = identity.flatten().scatter(0, rows * size + columns, lower)
    return log_diagonal.exp().unsqueeze(-1) * multiples.view(size, size)
