"""Cholesky factors by unconstrained parameters, as families of correlated normals hold them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def initial_factor(
    size: int, scale: float, like: Tensor, batch_shape: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the parameters of ``scale`` times the identity, of the dtype and device of ``like``."""
    log_diagonal = like.new_full((*batch_shape, size), math.log(scale))
    return log_diagonal, like.new_zeros(*batch_shape, size * (size - 1) // 2)


def factor_parameters(scale_tril: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameters of which :func:`cholesky_factor` makes these matrices.

    Args:
        scale_tril: Lower triangular matrices ``(*batch, n, n)`` with positive diagonals.

    Returns:
        ``log_diagonal (*batch, n)`` and ``lower (*batch, n (n - 1) / 2)``.

    Example:
        >>> log_diagonal, lower = factor_parameters(torch.tensor([[1.0, 0.0], [6.0, 2.0]]))
        >>> lower
        tensor([3.])
    """
    diagonal = scale_tril.diagonal(dim1=-2, dim2=-1)
    size, device = diagonal.shape[-1], diagonal.device
    rows, columns = torch.tril_indices(size, size, offset=-1, device=device)
    multiples = scale_tril / diagonal.unsqueeze(-1)
    return diagonal.log(), multiples[..., rows, columns]


def unit_of_lower(lower: Tensor) -> float:
    """Return the size of a change of each entry below a diagonal of n entries.

    An optimizer such as Adam moves each entry by about as much, so that a row of n entries moves by the
    root of n times that: ``1 / sqrt(n)``. In a large factor the entries are many and their gradients
    mostly noise, whose sum over rows grows besides: at most ``3 / n``.
    """
    size = (1 + math.isqrt(1 + 8 * lower.shape[-1])) // 2
    return min(1 / math.sqrt(size), 3 / size)


def cholesky_factor(log_diagonal: Tensor, lower: Tensor) -> Tensor:
    """Return the lower triangular matrices that the parameters hold.

    Args:
        log_diagonal: Logarithms of the diagonal, ``(*batch, n)``.
        lower: The entries below it, row by row and as multiples of the row's diagonal entry,
            ``(*batch, n (n - 1) / 2)``. As multiples, one learning rate serves rows of any size.

    Returns:
        Matrices ``(*batch, n, n)`` with positive diagonals.

    Example:
        >>> cholesky_factor(torch.tensor([1.0, 2.0]).log(), torch.tensor([3.0]))
        tensor([[1., 0.],
                [6., 2.]])
    """
    size, device = log_diagonal.shape[-1], log_diagonal.device
    rows, columns = torch.tril_indices(size, size, offset=-1, device=device)
    identity = torch.eye(size, dtype=lower.dtype, device=device).flatten()
    identities = identity.expand(*lower.shape[:-1], -1)
    multiples = identities.index_copy(-1, rows * size + columns, lower)
    return log_diagonal.exp().unsqueeze(-1) * multiples.view(*log_diagonal.shape, size)
