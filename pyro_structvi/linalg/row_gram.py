"""Products of the directions of a low-rank covariance, added up over a weight in double precision."""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import inside_transform, reshape_without_view
from pyro_structvi.linalg.precision import autocast_off

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
