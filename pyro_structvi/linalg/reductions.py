"""Sums over large weights, with gradients written by hand."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_jit_trace, inside_transform, reshape_without_view
from pyro_structvi.linalg.matrices import blocks_of_rows, event_sum
from pyro_structvi.linalg.precision import autocast_off


def add_scaled_noise(outputs: Tensor, coefficient: Tensor, noise: Tensor) -> Tensor:
    """Return ``outputs + coefficient * noise``, in the memory of ``outputs`` where that may be."""
    if inside_transform() or inside_jit_trace():  # which takes nothing that writes in place
        return torch.addcmul(outputs, coefficient, noise)
    total: Tensor = AddScaledNoise.apply(outputs, coefficient, noise)
    return total


def variance_and_sums(log_scale: Tensor, event_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``exp(2 l)``, its sum over an event, and twice the sum of ``l``."""
    if inside_transform():
        variance = (2 * log_scale).exp()
        return variance, event_sum(variance, event_dim), 2 * event_sum(log_scale, event_dim)
    sums: tuple[Tensor, Tensor, Tensor] = VarianceAndSums.apply(log_scale, event_dim)
    return sums


def bank_and_squared_norm(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x @ matrix'`` and ``|x|^2`` of each row, ``(rows, M)`` and ``(rows, 1)``."""
    if inside_transform():
        return x @ matrix.mT, x.square().sum(-1, keepdim=True)
    products: tuple[Tensor, Tensor] = BankAndSquaredNorm.apply(x, matrix)
    return products


class AddScaledNoise(torch.autograd.Function):
    """``outputs + coefficient * noise`` in the place of ``outputs``; noise takes no gradient."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, coefficient: Tensor, noise: Tensor) -> Tensor:
        """Add in place; the coefficient broadcasts to the outputs."""
        ctx.save_for_backward(noise)
        ctx.shape = coefficient.shape
        ctx.mark_dirty(outputs)
        return outputs.addcmul_(coefficient, noise)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Hand the gradient on, and sum its products with the noise."""
        (noise,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        return gradient, _sum_of_products(gradient, noise, ctx.shape), None


class BankAndSquaredNorm(torch.autograd.Function):
    """``x @ matrix'`` and ``|x|^2`` of each row, with one gradient of the size of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(rows, M)`` and ``(rows, 1)`` for ``x (rows, in)`` and ``matrix (M, in)``."""
        ctx.save_for_backward(x, matrix)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x @ matrix.mT, norms.square_()

    @staticmethod
    def backward(ctx: Any, of_bank: Tensor, of_norm: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients, the two for x as one product."""
        x, matrix = ctx.saved_tensors
        dtype = of_bank.dtype  # autocast has its own
        of_x = of_matrix = None
        if ctx.needs_input_grad[0]:
            of_x = torch.addmm((2 * of_norm * x).to(dtype), of_bank, matrix.to(dtype))
        if ctx.needs_input_grad[1]:
            of_matrix = of_bank.mT @ x.to(dtype)
        return of_x, of_matrix


class VarianceAndSums(torch.autograd.Function):
    """``exp(2 l)``, its sum, and twice the sum of ``l``: variances, their trace and log determinant."""

    @staticmethod
    def forward(ctx: Any, log_scale: Tensor, event_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(*batch, *event)`` and two of ``(*batch,)``, the sums over an event."""
        variance = (2 * log_scale).exp_()
        ctx.event_dim = event_dim
        ctx.save_for_backward(variance)
        ctx.save_for_forward(variance)
        ctx.set_materialize_grads(False)
        event = tuple(range(-event_dim, 0))
        total = variance.sum(event) if event else variance.clone()
        return variance, total, 2 * (log_scale.sum(event) if event else log_scale)

    @staticmethod
    def backward(
        ctx: Any, of_variance: Tensor | None, of_sum: Tensor | None, of_log_det: Tensor | None
    ) -> tuple[Tensor, None]:
        """Return ``2 v (g_v + g_sum) + 2 g_log_det``, in passes over one new tensor."""
        (variance,) = ctx.saved_tensors
        trace, log_det = (
            variance.new_zeros(()) if part is None else part[(...,) + (None,) * ctx.event_dim]
            for part in (of_sum, of_log_det)
        )
        factor = trace if of_variance is None else of_variance + trace
        return torch.addcmul(2 * log_det, variance, factor, value=2), None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``2 v dl``, its sum, and twice the sum of ``dl``."""
        (variance,) = ctx.saved_tensors
        tangent, event = 2 * variance * change, tuple(range(-ctx.event_dim, 0))
        if not event:
            return tangent, tangent.clone(), 2 * change
        return tangent, tangent.sum(event), 2 * change.sum(event)


def _sum_of_products(a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """Return ``a * b`` summed to a shape, without forming the products where it is one number."""
    if shape.numel() == 1:
        return torch.dot(a.reshape(-1).to(b.dtype), b.reshape(-1)).reshape(shape)
    return (a * b).sum_to_size(shape)


def squared_distance(mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
    """Return ``|mean - loc|^2`` over an event, ``(*batch,)``; ``loc`` broadcasts to the mean."""
    if inside_transform():
        return event_sum((mean - loc).square(), event_dim)
    distance: Tensor = SquaredDistance.apply(mean, loc, event_dim)
    return distance


class SquaredDistance(torch.autograd.Function):
    """``|mean - loc|^2`` over an event, with a gradient of one pass over the mean."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, loc: Tensor, event_dim: int) -> Tensor:
        """Add up the squares; torch's norm would lose digits in single precision."""
        ctx.event_dim = event_dim
        ctx.save_for_backward(mean, loc)
        ctx.save_for_forward(mean, loc)
        if loc.numel() > 1 or mean.dim() > event_dim:
            difference = mean - loc
            return event_sum(difference.mul_(difference), event_dim)
        differences = (
            block - loc.reshape(1, 1) for block in blocks_of_rows(mean.reshape(-1, 1), 1)
        )
        return reduce(torch.add, (each.mul_(each).sum() for each in differences))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return ``2 (mean - loc)``, and what is its opposite for ``loc``."""
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


_SMALL = 2**16  # numbers in factors whose products cost nothing in double precision


def row_gram(factors: Tensor, batch_dim: int) -> Tensor:
    """Return ``V'V (*batch, K, K)``, in double precision, of factors ``(*batch, K, out, *rest)``."""
    gram: Tensor = (
        _gram(factors, batch_dim) if inside_transform() else RowGram.apply(factors, batch_dim)
    )
    return gram


def _gram(factors: Tensor, batch_dim: int) -> Tensor:
    """Add the products within a row in the dtype of ``V``, and rows in double precision.

    Small weights are double from the start: they may have fewer elements than there are factors.
    """
    shape = factors.shape[: batch_dim + 2]
    rows = factors.reshape(*shape, -1).transpose(-3, -2)
    if factors.numel() <= _SMALL:
        rows = rows.double()
    with autocast_off(factors):
        gram: Tensor = (rows @ rows.mT).sum(-3, dtype=torch.float64)
    return gram


class RowGram(torch.autograd.Function):
    """``V'V`` of K factors ``(*batch, K, out, *rest)``, rows of the weight added in double precision.

    Its gradient is one product of size K x K x D. Left to autograd it would be several passes over
    tensors of the size of V, in another memory layout than V.
    """

    @staticmethod
    def forward(ctx: Any, factors: Tensor, batch_dim: int) -> Tensor:
        """Return the products, and keep the factors."""
        ctx.batch_dim = batch_dim
        ctx.save_for_backward(factors)
        ctx.save_for_forward(factors)
        return _gram(factors, batch_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return ``(G + G') V``, of the shape of ``V`` but no view, so that sums may be in place."""
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
