"""Cholesky factorizations, robust to rounding on every device."""

import torch
from torch import Tensor

from pyro_structvi._torch import is_recording
from pyro_structvi.linalg.matrices import identity_like

JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
LEAST_PIVOT = 3e-7  # relative to the largest; smaller pivots may be rounding errors


def log_det(matrix: Tensor) -> Tensor:
    """Return log determinants ``(*batch,)``, NaN for matrices that are not positive definite."""
    return 2 * tril_or_nan(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def stable_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a Cholesky factor with the smallest jitter that works, and the jitter ``(*batch,)``.

    The jitter is a multiple of the mean diagonal: 0, 1e-12, 1e-10, ..., or 1e-4; the factor is NaN if
    none works. A GPU tries all of them at once, without synchronization. Matrices are double.
    """
    if matrix.device.type != "cpu" or torch.compiler.is_exporting():
        return _best_of_all(matrix)
    if not is_recording():
        return _first_that_works(matrix)
    # A custom operation may read values; it has no gradient.
    tril, jitter = torch.ops.pyro_structvi.stable_cholesky(matrix.detach())
    if torch.is_grad_enabled() and matrix.requires_grad:
        return _with_jitter(matrix, jitter), jitter
    return tril, jitter


def stable_root(covariance: Tensor) -> Tensor:
    """Return a Cholesky factor with jitter, factored in double precision.

    The factor of a covariance of zero, as of outputs at an input of zero, is zero without a gradient,
    as in :func:`floored_sqrt`.
    """
    double = covariance.double()
    is_zero = double.diagonal(dim1=-2, dim2=-1).amax(-1) <= torch.finfo(double.dtype).tiny
    tril, _ = stable_cholesky(add_to_diagonal(double, is_zero.double()))
    return tril.masked_fill(is_zero[..., None, None], 0.0).to(covariance)


def _first_that_works(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`stable_cholesky` by one factorization in the usual case."""
    tril, failed = _try_cholesky(matrix)
    if not bool(failed.any()):
        return tril, matrix.new_zeros(matrix.shape[:-2])
    tril, jitter = _best_of_all(matrix)
    as_factored = tril.mT.contiguous().mT  # the layout of the fake implementation below
    return as_factored, jitter


# An operation that reads values on the CPU inside a recorded step.
torch.library.define("pyro_structvi::stable_cholesky", "(Tensor matrix) -> (Tensor, Tensor)")
torch.library.impl("pyro_structvi::stable_cholesky", "CPU", _first_that_works)
torch.library.register_fake(
    "pyro_structvi::stable_cholesky",
    lambda matrix: (torch.linalg.cholesky_ex(matrix).L, matrix.new_empty(matrix.shape[:-2])),
)


def _best_of_all(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor with the smallest jitter that works for each matrix; 0 if none does."""
    with torch.no_grad():
        diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        tried = torch.stack([diagonal * jitter for jitter in JITTERS], -1)
        _, failed = _try_cholesky(add_to_diagonal(matrix.unsqueeze(-3), tried))
        jitter = tried.gather(-1, failed.long().argmin(-1, keepdim=True)).squeeze(-1)
    return _with_jitter(matrix, jitter), jitter


def _with_jitter(matrix: Tensor, jitter: Tensor) -> Tensor:
    tril, failed = _try_cholesky(add_to_diagonal(matrix, jitter))
    return tril.masked_fill(failed[..., None, None], torch.nan)


def _try_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower factor, and where it is missing or dominated by rounding, ``(*batch,)``."""
    tril, info = torch.linalg.cholesky_ex(matrix)
    least, most = torch.aminmax(tril.detach().diagonal(dim1=-2, dim2=-1), dim=-1)
    return tril, (info > 0) | (least < LEAST_PIVOT * most)


def add_to_diagonal(matrix: Tensor, value: Tensor) -> Tensor:
    """Return ``matrix (*batch, M, M)`` plus ``value (*batch,)`` times the identity."""
    return matrix + value[..., None, None] * identity_like(matrix)


def tril_or_nan(matrix: Tensor) -> Tensor:
    """Return Cholesky factors of ``(*batch, M, M)``, NaN for matrices that are not positive definite."""
    tril, info = torch.linalg.cholesky_ex(matrix)
    # A product, since its gradient is NaN too.
    return tril * torch.where(info > 0, torch.nan, 1.0).to(tril)[..., None, None]
