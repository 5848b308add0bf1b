"""The log determinant of independent normals whose standard deviations are a product of thin factors."""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_transform
from pyro_structvi.linalg.blocks import blocks_of_rows


def sum_of_logs(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the sum of ``log (R C')`` for ``R (*batch, out, k)`` and ``C (*batch, in, k)``."""
    if inside_transform():
        return (rows @ columns.mT).log().sum((-2, -1))
    total: Tensor = SumOfLogs.apply(rows, columns)
    return total


class SumOfLogs(torch.autograd.Function):
    """The sum over ``log (R C')`` and its gradients, block by block: nothing out x in is formed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        """Add up the logarithms of each product; keep ``(1 / R C') C`` and ``(1 / R C')' R``."""
        transposed = (
            columns.mT.contiguous()
        )  # thin factors first, and row by row: see the docs on speed
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
        """Scale the gradients, which are formed again where they are to be differentiated."""
        rows, columns, of_rows, of_columns = ctx.saved_tensors
        if torch.is_grad_enabled():
            inverses = (rows @ columns.mT).reciprocal()
            of_rows, of_columns = inverses @ columns, inverses.mT @ rows
        gradient = gradient[..., None, None]
        return gradient * of_rows, gradient * of_columns

    @staticmethod
    def jvp(ctx: Any, rows_change: Tensor | None, columns_change: Tensor | None) -> Tensor:
        """Return the sum over the change of the products, relative to them."""
        rows, columns, *_ = ctx.saved_tensors
        change = torch.zeros_like(rows @ columns.mT)
        if rows_change is not None:
            change = change + rows_change @ columns.mT
        if columns_change is not None:
            change = change + rows @ columns_change.mT
        total: Tensor = (change / (rows @ columns.mT)).sum((-2, -1))
        return total
