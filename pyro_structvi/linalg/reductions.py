"""Sums over large weights."""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_transform, reshape_without_view
from pyro_structvi.linalg.matrices import blocks_of_rows, event_sum
from pyro_structvi.linalg.precision import autocast_off

_FEW = 2**10  # elements; for fewer, torch's own operations are faster than an autograd function


def squared_distance(mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
    """Return ``|mean - loc|^2`` over an event, ``(*batch,)``; ``loc`` broadcasts to the mean."""
    if inside_transform() or mean.numel() <= _FEW:
        difference = mean - loc
        return event_sum(difference * difference, event_dim)
    distance: Tensor = SquaredDistance.apply(mean, loc, event_dim)
    return distance


class SquaredDistance(torch.autograd.Function):
    """``|mean - loc|^2`` over an event; its gradient keeps nothing of the weight's size but the mean."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
        """Sum the squares; BLAS dot products lose digits of long sums in single precision."""
        ctx.event_dim = event_dim
        ctx.save_for_backward(mean, loc)
        ctx.save_for_forward(mean, loc)
        difference = mean - loc
        return event_sum(difference.mul_(difference), event_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return ``2 (mean - loc)``, and its negative sum for ``loc``."""
        mean, loc = ctx.saved_tensors
        twice = 2 * gradient.reshape((*gradient.shape, *(1 for _ in range(ctx.event_dim))))
        of_mean = torch.addcmul(-twice * loc, mean, twice)
        of_loc = -of_mean.sum_to_size(loc.shape) if ctx.needs_input_grad[1] else None
        return of_mean, of_loc, None

    @staticmethod
    def jvp(ctx: Any, of_mean: Tensor | None, of_loc: Tensor | None, _: None) -> Tensor:
        """Return ``2 (mean - loc)`` times the difference of the tangents."""
        mean, loc = ctx.saved_tensors
        tangent = torch.zeros_like(mean) if of_mean is None else of_mean
        if of_loc is not None:
            tangent = tangent - of_loc
        return event_sum(2 * (mean - loc) * tangent, ctx.event_dim)


def sum_of_logs(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the sum of ``log (R C')`` for ``R (*batch, out, k)`` and ``C (*batch, in, k)``."""
    if inside_transform() or rows.shape[-2] * columns.shape[-2] <= _FEW:
        return (rows @ columns.mT).log().sum((-2, -1))
    total: Tensor = SumOfLogs.apply(rows, columns)
    return total


class SumOfLogs(torch.autograd.Function):
    """The sum of ``log (R C')`` and its gradients in blocks of rows, in O((out + in) k) memory."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        """Sum the logarithms of each block; keep ``(1 / R C') C`` and ``(1 / R C')' R``."""
        transposed = columns.mT.contiguous()  # products of thin, contiguous factors are faster
        total, of_columns = rows.new_zeros(rows.shape[:-2]), torch.zeros_like(transposed)
        of_rows = []
        for block in blocks_of_rows(rows, columns.shape[-2]):
            products = block @ transposed
            total = total + products.log().sum((-2, -1))
            inverses = products.reciprocal_()
            of_rows.append((transposed @ inverses.mT).mT)
            of_columns = of_columns + block.mT.contiguous() @ inverses
        kept = rows, columns, torch.cat(of_rows, -2), of_columns.mT
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the stored gradients; recompute them for second derivatives."""
        rows, columns, of_rows, of_columns = ctx.saved_tensors
        if torch.is_grad_enabled():
            inverses = (rows @ columns.mT).reciprocal()
            of_rows, of_columns = inverses @ columns, inverses.mT @ rows
        gradient = gradient[..., None, None]
        return gradient * of_rows, gradient * of_columns

    @staticmethod
    def jvp(ctx: Any, rows_change: Tensor | None, columns_change: Tensor | None) -> Tensor:
        """Return the sum of the relative changes of the products."""
        rows, columns, *_ = ctx.saved_tensors
        products = rows @ columns.mT
        change = torch.zeros_like(products)
        if rows_change is not None:
            change = change + rows_change @ columns.mT
        if columns_change is not None:
            change = change + rows @ columns_change.mT
        total: Tensor = (change / products).sum((-2, -1))
        return total


_SMALL = 2**16  # elements; double precision costs nothing below


def row_gram(factors: Tensor, batch_dim: int) -> Tensor:
    """Return ``V'V (*batch, K, K)``, in double precision, of factors ``(*batch, K, out, *rest)``."""
    gram: Tensor = (
        _gram(factors, batch_dim) if inside_transform() else RowGram.apply(factors, batch_dim)
    )
    return gram


def _gram(factors: Tensor, batch_dim: int) -> Tensor:
    """Sum within a row in the dtype of ``V``, and over rows in double precision.

    Small factors are double throughout: a weight may have fewer elements than directions.
    """
    shape = factors.shape[: batch_dim + 2]
    rows = factors.reshape(*shape, -1).transpose(-3, -2)
    if factors.numel() <= _SMALL:
        rows = rows.double()
    with autocast_off(factors):
        gram: Tensor = (rows @ rows.mT).sum(-3, dtype=torch.float64)
    return gram


class RowGram(torch.autograd.Function):
    """:func:`row_gram` with a gradient of one product, in the memory layout of the factors."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, batch_dim: int) -> Tensor:
        """Return the products, and keep the factors."""
        ctx.batch_dim = batch_dim
        ctx.save_for_backward(factors)
        ctx.save_for_forward(factors)
        return _gram(factors, batch_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return ``(G + G') V``, as no view, so that gradients can be accumulated in place."""
        (factors,) = ctx.saved_tensors
        symmetric = (gradient + gradient.mT).to(factors.dtype)
        flat = factors.flatten(ctx.batch_dim + 1)
        with autocast_off(factors):
            product = symmetric * flat if flat.shape[-2] == 1 else symmetric @ flat
        return reshape_without_view(product, factors.shape), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Return ``T V' + V T'``."""
        (factors,) = ctx.saved_tensors
        flat = factors.flatten(ctx.batch_dim + 1).double()
        product: Tensor = tangent.flatten(ctx.batch_dim + 1).double() @ flat.mT
        return product + product.mT
