"""Bounded scales and Cholesky factors as unconstrained parameters."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def capped(log_value: Tensor, most: float | None) -> Tensor:
    """Return ``exp(log_value)`` with a smooth upper bound ``most``, and with a gradient everywhere."""
    return log_value.exp() if most is None else most * torch.sigmoid(log_value - math.log(most))


def capped_log(log_value: Tensor, most: float | None) -> Tensor:
    """Return the logarithm of :func:`capped`, accurate far below the bound."""
    if most is None:
        return log_value
    return math.log(most) + F.logsigmoid(log_value - math.log(most))


def uncapped(value: float, most: float | None) -> float:
    """Return the inverse of :func:`capped` at a value, or at half the bound if that is less."""
    if most is None:
        return math.log(value)
    value = min(value, most / 2)
    return math.log(value) - math.log1p(-value / most)


def initial_factor(
    size: int, scale: float, like: Tensor, batch_shape: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the parameters of ``scale`` times the identity, of the dtype and device of ``like``."""
    log_diagonal = like.new_full((*batch_shape, size), math.log(scale))
    return log_diagonal, like.new_zeros(*batch_shape, size * (size - 1) // 2)


def unit_of_lower(lower: Tensor) -> float:
    """Return the unit of steps of the entries below a diagonal; see :func:`unit_of_row`."""
    return unit_of_row((1 + math.isqrt(1 + 8 * lower.shape[-1])) // 2)


def unit_of_row(size: int) -> float:
    """Return the unit of steps of the entries of a row of n entries.

    It is ``1 / sqrt(n)``, since Adam moves all entries equally and a row of n entries by the root of n
    times as much. For large n it is at most ``3 / n``, since the gradients are mostly noise.
    """
    return min(1 / math.sqrt(size), 3 / size)


def unit_of_across(across: Tensor) -> float:
    """Return the unit of steps of entries between rows ``(rows (rows - 1) / 2, n, n)``.

    It is one over the number of elements, since the gradients are mostly noise.
    """
    pairs, size = across.shape[:2]
    rows = (1 + math.isqrt(1 + 8 * pairs)) // 2
    return 1 / (rows * size)


def places_below(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of entries below the diagonal in a flat factor of rows of n elements.

    They are ``(rows, n (n - 1) / 2)`` within rows, and ``(rows (rows - 1) / 2, n, n)`` between two rows.
    """
    total = rows * size
    row, column = torch.tril_indices(size, size, offset=-1, device=device)
    starts = torch.arange(rows, device=device).unsqueeze(-1) * size * (total + 1)
    later, earlier = torch.tril_indices(rows, rows, offset=-1, device=device)
    corners = ((later * total + earlier) * size).view(-1, 1, 1)
    own = torch.arange(size, device=device)
    return starts + row * total + column, corners + own.unsqueeze(-1) * total + own


def factor_of_rows(log_diagonal: Tensor, lower: Tensor, across: Tensor) -> Tensor:
    """Return a Cholesky factor ``(rows n, rows n)`` over the rows of a matrix.

    Its entries below the diagonal, within rows and between rows as in :func:`places_below`, are given as
    multiples of the diagonal entry in their row of the factor.

    Example:
        >>> across = torch.arange(1.0, 5.0).view(1, 2, 2)
        >>> factor_of_rows(torch.zeros(4), torch.tensor([[8.0], [9.0]]), across)
        tensor([[1., 0., 0., 0.],
                [8., 1., 0., 0.],
                [1., 2., 1., 0.],
                [3., 4., 9., 1.]])
    """
    rows, device = len(lower), log_diagonal.device
    within, between = places_below(rows, len(log_diagonal) // rows, device)
    places = torch.cat([within.flatten(), between.flatten()])
    return _filled(log_diagonal, places, torch.cat([lower.flatten(), across.flatten()]))


def parameters_of_rows(scale_tril: Tensor, like: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a factor of a matrix, the inverse of :func:`factor_of_rows`.

    Those of a vector or a single row are the arguments of :func:`cholesky_factor`.
    """
    rows = len(like) if like.dim() > 1 else 1
    diagonal = scale_tril.diagonal()
    multiples = (scale_tril / diagonal.unsqueeze(-1)).flatten()
    places = places_below(rows, len(diagonal) // rows, scale_tril.device)
    lower, across = (multiples[place] for place in places)
    further = {"lower": lower, "across": across} if rows > 1 else {"lower": lower[0]}
    return {"log_diagonal": diagonal.log(), **further}


def cholesky_factor(log_diagonal: Tensor, lower: Tensor) -> Tensor:
    """Return lower triangular matrices ``(*batch, n, n)`` with positive diagonals.

    Args:
        log_diagonal: Logarithms of the diagonal, ``(*batch, n)``.
        lower: The entries below it, row by row, ``(*batch, n (n - 1) / 2)``, as multiples of the
            diagonal entry of the row, so that one learning rate fits rows of any size.

    Example:
        >>> cholesky_factor(torch.tensor([1.0, 2.0]).log(), torch.tensor([3.0]))
        tensor([[1., 0.],
                [6., 2.]])
    """
    size = log_diagonal.shape[-1]
    rows, columns = torch.tril_indices(size, size, offset=-1, device=log_diagonal.device)
    return _filled(log_diagonal, rows * size + columns, lower)


def _filled(log_diagonal: Tensor, places: Tensor, entries: Tensor) -> Tensor:
    """Return matrices with these diagonals, and multiples of their entries at flat indices."""
    size, device = log_diagonal.shape[-1], log_diagonal.device
    identity = torch.eye(size, dtype=entries.dtype, device=device).flatten()
    multiples = identity.expand(*entries.shape[:-1], -1).index_copy(-1, places, entries)
    return log_diagonal.exp().unsqueeze(-1) * multiples.view(*log_diagonal.shape, size)
