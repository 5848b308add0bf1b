"""Steps with gradients by hand, which save passes over large tensors.

They have no rules for the transforms of torch.func; the functions take torch's own steps there.
"""

from typing import Any

import torch
from torch import Tensor


def add_scaled_noise(outputs: Tensor, coefficient: Tensor, noise: Tensor) -> Tensor:
    """Return ``outputs + coefficient * noise``, in the memory of ``outputs`` where that may be."""
    if inside_transform():
        return torch.addcmul(outputs, coefficient, noise)
    total: Tensor = AddScaledNoise.apply(outputs, coefficient, noise)
    return total


def bank_and_squared_norm(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x @ matrix'`` and ``|x|^2`` of each row, ``(rows, M)`` and ``(rows, 1)``."""
    if inside_transform():
        return x @ matrix.mT, x.square().sum(-1, keepdim=True)
    products: tuple[Tensor, Tensor] = BankAndSquaredNorm.apply(x, matrix)
    return products


def inside_transform() -> bool:
    """Whether this code runs inside a transform of torch.func, such as vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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


def _sum_of_products(a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """Return ``a * b`` summed to a shape, without forming the products where it is one number."""
    if shape.numel() == 1:
        return torch.dot(a.reshape(-1).to(b.dtype), b.reshape(-1)).reshape(shape)
    return (a * b).sum_to_size(shape)
