"""Steps with gradients by hand, which save passes over large tensors.

Where one has no rules for the transforms of torch.func, its function takes torch's own steps there.
"""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_jit_trace, inside_transform
from pyro_structvi.linalg.matrices import event_sum


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
