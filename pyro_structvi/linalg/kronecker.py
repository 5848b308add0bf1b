"""Densities of covariances of Kronecker structure, without a derivative of ``eigh``."""

from typing import Any

import torch
from torch import Tensor


class KroneckerLogDet(torch.autograd.Function):
    """``log det(I - G (x) F)``, where ``I - G`` and ``I - F`` are given; no derivative of ``eigh``.

    Sums over the eigenvalues ``g`` and ``f`` of the two: ``1 - (1 - g) (1 - f) = g + f - g f`` keeps its
    digits where G and F come close to the identity.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the log determinant ``(*batch,)`` for ``(*batch, M, M)`` and ``(*batch, N, N)``."""
        (g, row_basis), (f, column_basis) = torch.linalg.eigh(rows), torch.linalg.eigh(columns)
        spectrum = _spectrum(g, f)
        ctx.save_for_backward(g, f, row_basis, column_basis)
        return spectrum.log().sum((-2, -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to both matrices."""
        _refuse_second_derivatives()
        g, f, row_basis, column_basis = ctx.saved_tensors
        weights = gradient[..., None, None] / _spectrum(g, f)
        of_g = (weights * (1 - f).unsqueeze(-2)).sum(-1, keepdim=True)
        of_f = (weights * (1 - g).unsqueeze(-1)).sum(-2).unsqueeze(-1)
        return row_basis @ (of_g * row_basis.mT), column_basis @ (of_f * column_basis.mT)


class KroneckerQuadratic(torch.autograd.Function):
    """``k' (I - G (x) F)^-1 k``, where ``I - G`` and ``I - F`` are given; no derivative of ``eigh``."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return ``(*sample, *batch)`` for ``k (*sample, *batch, M, N)``."""
        (g, row_basis), (f, column_basis) = torch.linalg.eigh(rows), torch.linalg.eigh(columns)
        rotated = (row_basis.mT @ k @ column_basis) / _spectrum(g, f)
        solution = row_basis @ rotated @ column_basis.mT
        ctx.save_for_backward(solution, rows, columns)
        quadratic: Tensor = (solution * k).sum((-2, -1))
        return quadratic

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients with respect to ``k`` and both matrices."""
        _refuse_second_derivatives()
        solution, rows, columns = ctx.saved_tensors
        weighted = gradient[..., None, None] * solution
        of_rows = weighted @ (columns @ solution.mT - solution.mT)
        of_columns = weighted.mT @ (rows @ solution - solution)
        return 2 * weighted, of_rows.sum_to_size(rows.shape), of_columns.sum_to_size(columns.shape)


def _refuse_second_derivatives() -> None:
    """Raise where a graph of the gradients is asked for: torch's decorator lets most pass as zeros."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A density of Kronecker structure has first derivatives only. Differentiate it without "
            "`create_graph=True`."
        )


def _spectrum(g: Tensor, f: Tensor) -> Tensor:
    g, f = g.unsqueeze(-1), f.unsqueeze(-2)
    return (g + f - g * f).clamp_min(torch.finfo(g.dtype).tiny)
