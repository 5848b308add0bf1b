"""Shapes, precision, triangular solves, Kronecker products, Hadamard transforms, sums over weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import shape_text
from pyro_structvi._torch import (
    can_read,
    inside_forward_derivative,
    inside_transform,
    reshape_without_view,
)


def standard_normal(shape: Any, like: Tensor) -> Tensor:
    """Draw standard normal noise of the dtype and device of a tensor."""
    return torch.randn(shape, dtype=like.dtype, device=like.device)


def identity_like(matrix: Tensor) -> Tensor:
    """Return the identity of the size, dtype and device of a square matrix ``(*batch, n, n)``."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def event_sum(tensor: Tensor, event_dim: int) -> Tensor:
    """Sum over the last dimensions."""
    # With no dimensions torch would sum over all.
    return tensor.sum(tuple(range(-event_dim, 0))) if event_dim else tensor


def shrink(tensor: Tensor, event_dim: int) -> Tensor:
    """Return ``(*batch, *event)`` with expanded event dimensions reduced to size 1."""
    index: Any = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    return tensor[(..., *index[tensor.dim() - event_dim :])]


BLOCK = 2**18  # numbers

_IN_ONE: ContextVar[bool] = ContextVar("in_one", default=False)


@contextmanager
def rows_in_one() -> Iterator[None]:
    """Disable :func:`blocks_of_rows` in a block of code, for a compiler that tiles loops."""
    token = _IN_ONE.set(True)
    try:
        yield
    finally:
        _IN_ONE.reset(token)


def blocks_of_rows(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    """Split ``rows (*batch, n, k)`` into blocks that fit a CPU cache with ``width`` numbers a row."""
    if rows.device.type != "cpu" or _IN_ONE.get():
        return (rows,)
    return rows.split(max(1, BLOCK // max(1, width)), dim=-2)


def solve_lower(tril: Tensor, vectors: Tensor) -> Tensor:
    """Return ``L^-1 v`` for lower triangular ``L (*batch, n, n)`` and ``v (*sample, *batch, n)``."""
    sample = vectors.shape[: vectors.dim() - tril.dim() + 1]
    columns = vectors.reshape(sample.numel(), *vectors.shape[len(sample) :]).movedim(0, -1)
    solved: Tensor = torch.linalg.solve_triangular(tril, columns, upper=False)
    return solved.movedim(-1, 0).reshape(vectors.shape)


def kronecker(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the Kronecker product of matrices, ``(*batch, A C, B D)``."""
    product = torch.einsum("...ab,...cd->...acbd", rows, columns)
    return product.flatten(-4, -3).flatten(-2)


def kronecker_log_det(rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``log det(I - G (x) F) (*batch,)`` for given ``I - G`` and ``I - F``.

    With their eigenvalues g and f, ``g + f - g f`` is accurate for G and F close to the identity.
    """
    spectrum = _spectrum(torch.linalg.eigvalsh(rows), torch.linalg.eigvalsh(columns))
    return once_differentiable(spectrum.log().sum((-2, -1)), _KRONECKER)


def kronecker_quadratic(k: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``k' (I - G (x) F)^-1 k (*sample, *batch)`` for given ``I - G`` and ``I - F``.

    The solution x is a constant in ``2 k' x - x' (I - G (x) F) x``, which has the right first
    derivatives. Derivatives of eigenvectors are unstable at close eigenvalues.
    """
    (g, row_basis), (f, column_basis) = (
        torch.linalg.eigh(each.detach()) for each in (rows, columns)
    )
    rotated = (row_basis.mT @ k.detach() @ column_basis) / _spectrum(g, f)
    solution = row_basis @ rotated @ column_basis.mT
    of_rows = rows @ solution
    product = of_rows + (solution - of_rows) @ columns
    return once_differentiable((solution * (2 * k - product)).sum((-2, -1)), _KRONECKER)


_KRONECKER = "A density of Kronecker structure"


def once_differentiable(value: Tensor, subject: str, otherwise: str = "") -> Tensor:
    """Refuse second derivatives; torch's function of this name returns zeros in most cases."""

    def refuse(*_: Tensor) -> None:
        if torch.is_grad_enabled() or inside_forward_derivative():
            raise RuntimeError(
                f"{subject} has first derivatives only. Differentiate it without `create_graph=True`, "
                f"and not in forward mode.{otherwise}"
            )

    if inside_forward_derivative():
        refuse()
    if value.requires_grad:
        value.register_hook(refuse)
    return value


def _spectrum(g: Tensor, f: Tensor) -> Tensor:
    g, f = g.unsqueeze(-1), f.unsqueeze(-2)
    return (g + f - g * f).clamp_min(torch.finfo(g.dtype).tiny)


_LARGEST_FACTOR_BITS = 5


def walsh_hadamard_transform(x: Tensor) -> Tensor:
    r"""Multiply the last dimension by the orthonormal Walsh-Hadamard matrix, in natural order.

    The matrix is :math:`H_1 = 1`, :math:`H_{2m} = \begin{pmatrix} H_m & H_m \\ H_m & -H_m
    \end{pmatrix} / \sqrt{2}`, symmetric and its own inverse. Since :math:`H_{rm} = H_r \otimes H_m`, the
    transform multiplies by matrices of at most 32 rows along one axis at a time, in O(D log D), which is
    faster than log2(D) sums and differences.

    Example:
        >>> walsh_hadamard_transform(torch.tensor([3.0, 1.0, 0.0, 0.0]))
        tensor([2., 1., 2., 1.])
    """
    size = x.shape[-1] if x.dim() else 0
    if size < 1 or size & (size - 1):
        raise ValueError(
            "The last dimension of `x` must be a power of two, but got the shape "
            f"{shape_text(x.shape)}. Pad it with zeros, by `torch.nn.functional.pad`."
        )
    transformed, inner = x, size
    for factor in _factors(size):
        inner //= factor
        matrix = torch.from_numpy(_hadamard_matrix(factor)).to(x)
        if inner == 1:
            transformed = transformed.reshape(-1, factor) @ matrix
        else:
            transformed = matrix @ transformed.reshape(-1, factor, inner)
    return transformed.reshape(x.shape)


def _factors(size: int) -> list[int]:
    """Split a power of two into the fewest factors of similar size."""
    bits = size.bit_length() - 1
    count = max(math.ceil(bits / _LARGEST_FACTOR_BITS), 1)
    return [2 ** ((bits + index) // count) for index in range(count)]


@cache
def _hadamard_matrix(size: int) -> np.ndarray:
    """Return the orthonormal matrix of a power of two, as an array without a device."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast for the device of a tensor."""
    # Torch's own context takes longer than a small operation.
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disable autocast on all devices, as a context or a decorator."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor has floating-point numbers of less than 32 bits."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4


def at_least_single(tensor: Tensor) -> Tensor:
    """Return half precision as single, and other tensors as they are.

    A sum in bfloat16 is rounded to 8 bits, a log likelihood of -67,000 nats to a multiple of 512.
    """
    return tensor.float() if is_half(tensor) else tensor


_STIRLING = 1e3  # above, the next term of the series is below the rounding of a logarithm


def log_gamma_ratio(df: Tensor, size: int) -> Tensor:
    """Return ``log Gamma((df + size) / 2) - log Gamma(df / 2)``, in double.

    Both are of the size of df, so that the difference of large ones is rounding. It then follows from
    Stirling's series of both.
    """
    half, change = df.double() / 2, size / 2
    direct = torch.lgamma(half + change) - torch.lgamma(half)
    if can_read(half) and bool((half < _STIRLING).all()):
        return direct.to(df.dtype)
    far = half.clamp_min(_STIRLING)  # elsewhere the series has gradients that are not finite
    series = change * far.log() + (far + change - 0.5) * (change / far).log1p()
    series = series - change - change / (12 * far * (far + change))
    return torch.where(half <= _STIRLING, direct, series).to(df.dtype)


def floored_sqrt(variance: Tensor) -> Tensor:
    """Return the root of variances of at least the dtype's smallest normal number, at least in single.

    A variance of zero, or one that is negative by rounding, then has a finite gradient.
    """
    variance = at_least_single(variance)
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


T = TypeVar("T")


class _GradCachedProperty(cached_property[Any]):
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None or instance._with_grad is torch.is_grad_enabled():
            return super().__get__(instance, owner)
        if instance._with_grad is False:  # and gradients are enabled
            return self.func(instance)
        with torch.set_grad_enabled(bool(instance._with_grad)):
            return super().__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:  # so that no access goes past `__get__`
        raise AttributeError(f"`{self.attrname}` is computed, and cannot be set.")


def grad_cached_property(form: Callable[[Any], T]) -> cached_property[T]:
    """Return a cached property, with gradients if the object was made with them (``_with_grad``).

    An object that was made without gradients may have arguments with them. Its property is then computed
    anew while gradients are enabled, so that no graph outlives its backward pass. With ``_with_grad``
    None a property never has gradients.
    """
    return _GradCachedProperty(form)


_FEW = 2**10  # elements; for fewer, torch's own operations are faster than an autograd function


def sum_of_logs(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the sum of ``log (R C')`` for ``R (*batch, out, k)`` and ``C (*batch, in, k)``."""
    if inside_transform() or rows.shape[-2] * columns.shape[-2] <= _FEW:
        return (rows @ columns.mT).log().sum((-2, -1))
    return SumOfLogs.apply(rows, columns)


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
        ctx.save_for_backward(rows, columns, torch.cat(of_rows, -2), of_columns.mT)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns, of_rows, of_columns = ctx.saved_tensors
        if torch.is_grad_enabled():
            inverses = (rows @ columns.mT).reciprocal()
            of_rows, of_columns = inverses @ columns, inverses.mT @ rows
        gradient = gradient[..., None, None]
        return gradient * of_rows, gradient * of_columns


_SMALL = 2**16  # elements; double precision costs nothing below


def row_gram(factors: Tensor, batch_dim: int) -> Tensor:
    """Return ``V'V (*batch, K, K)``, in double precision, of factors ``(*batch, K, out, *rest)``."""
    return _gram(factors, batch_dim) if inside_transform() else RowGram.apply(factors, batch_dim)


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
        ctx.batch_dim = batch_dim
        ctx.save_for_backward(factors)
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
