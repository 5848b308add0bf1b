"""Factorizations that every device and dtype survives, and densities of Kronecker structure."""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import is_tracing

JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
BLOCK = 2**18  # numbers
LEAST_PIVOT = 3e-7  # of the largest; less may be all rounding


def stable_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a Cholesky factor and the jitter that it took, the smallest of a few that works.

    The jitter is a multiple of the mean diagonal, one of 0, 1e-12, 1e-10, ..., 1e-4. On a GPU, and where
    a step is traced, the host does not wait: all of them are tried at once.

    Args:
        matrix: Symmetric, ``(*batch, M, M)``, in double precision.

    Returns:
        The lower factor, of NaN where no jitter helps, and what was added to the diagonal
        ``(*batch,)``.
    """
    if matrix.device.type == "cpu" and not is_tracing():
        tril, failed = _try_cholesky(matrix)
        if not bool(failed.any()):
            return tril, matrix.new_zeros(matrix.shape[:-2])
    jitter = smallest_jitter(matrix)
    tril, failed = _try_cholesky(add_to_diagonal(matrix, jitter))
    return tril.masked_fill(failed[..., None, None], torch.nan), jitter


@torch.no_grad()
def smallest_jitter(matrix: Tensor) -> Tensor:
    """Return the jitter ``(*batch,)`` that each matrix takes, by trying all at once; 0 if none helps."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    tried = torch.stack([diagonal * jitter for jitter in JITTERS], -1)
    _, failed = _try_cholesky(add_to_diagonal(matrix.unsqueeze(-3), tried))
    first = failed.long().argmin(-1, keepdim=True)
    return tried.gather(-1, first).squeeze(-1)


def _try_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower factor, and where it does not exist or is lost in rounding, ``(*batch,)``."""
    tril, info = torch.linalg.cholesky_ex(matrix)
    pivots = tril.detach().diagonal(dim1=-2, dim2=-1)
    return tril, (info > 0) | (pivots.amin(-1) < LEAST_PIVOT * pivots.amax(-1))


def blocks_of_rows(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    """Split ``rows (*batch, n, k)`` so that a block of them by ``width`` stays in a CPU's cache."""
    if rows.device.type != "cpu" or is_tracing():
        return (rows,)
    blocks: tuple[Tensor, ...] = rows.split(max(1, BLOCK // max(1, width)), dim=-2)
    return blocks


def add_to_diagonal(matrix: Tensor, value: Tensor) -> Tensor:
    """Return ``matrix (*batch, M, M)`` plus ``value (*batch,)`` times the identity."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + value[..., None, None] * identity


class OrthonormalRows(torch.autograd.Function):
    """``L^-1 [Z, D]`` for ``L L' = Z Z' + D^2``: the LQ decomposition of ``[Z, D]``, by Cholesky.

    Factored in double precision, with the smallest jitter that works, which counts to ``D^2``. The
    gradient is that of the decomposition, in the arguments' precision.
    """

    @staticmethod
    def forward(factor: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``L^-1 Z``, ``L^-1 D`` and the jitter for ``Z (*b, M, size)`` and ``D (*b, M)``."""
        double, square = factor.double(), diagonal.double().square()
        tril, jitter = stable_cholesky(double @ double.mT + torch.diag_embed(square))
        identity = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device)
        inverse = torch.linalg.solve_triangular(tril, identity.expand_as(tril), upper=False)
        remainder = inverse * (square + jitter.unsqueeze(-1)).sqrt().unsqueeze(-2)
        return (inverse @ double).to(factor.dtype), remainder.to(factor.dtype), jitter

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Keep the rows and the diagonal, which together say what ``L^-1`` is."""
        (_, diagonal), (basis, remainder, jitter) = inputs, output
        ctx.save_for_backward(basis, remainder, diagonal, jitter)
        ctx.save_for_forward(basis, remainder, diagonal, jitter)
        ctx.mark_non_differentiable(jitter)

    @staticmethod
    def backward(
        ctx: Any, of_basis: Tensor, of_remainder: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``Z`` and ``D``."""
        basis, remainder, diagonal, jitter = ctx.saved_tensors
        inverse, share = _inverse_and_share(remainder, diagonal, jitter)
        product = of_basis @ basis.mT + of_remainder @ remainder.mT
        symmetric = product.tril() + product.tril(-1).mT
        of_factor = inverse.mT @ (of_basis - symmetric @ basis)
        of_diagonal = (inverse * (of_remainder - symmetric @ remainder)).sum(-2)
        return of_factor, of_diagonal * share

    @staticmethod
    def jvp(
        ctx: Any, of_factor: Tensor | None, of_diagonal: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        """Return the tangents of ``L^-1 Z`` and ``L^-1 D``."""
        basis, remainder, diagonal, jitter = ctx.saved_tensors
        inverse, share = _inverse_and_share(remainder, diagonal, jitter)
        left, right = torch.zeros_like(basis), torch.zeros_like(remainder)
        if of_factor is not None:
            left = inverse @ of_factor
        if of_diagonal is not None:
            right = inverse * (share * of_diagonal).unsqueeze(-2)
        product = left @ basis.mT + right @ remainder.mT
        of_tril = product.tril() + product.triu(1).mT
        return left - of_tril @ basis, right - of_tril @ remainder, None


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


def _inverse_and_share(
    remainder: Tensor, diagonal: Tensor, jitter: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``L^-1`` from ``L^-1 D``, and how much of the jittered ``D`` is ``D`` itself."""
    jittered = (diagonal.double().square() + jitter.unsqueeze(-1)).sqrt().to(diagonal.dtype)
    return remainder / jittered.unsqueeze(-2), diagonal / jittered


def _spectrum(g: Tensor, f: Tensor) -> Tensor:
    g, f = g.unsqueeze(-1), f.unsqueeze(-2)
    return (g + f - g * f).clamp_min(torch.finfo(g.dtype).tiny)
