"""Triangular factors of covariances, for any number of draws in front of their batch."""

import torch
from torch import Tensor


def solve_lower(tril: Tensor, vectors: Tensor) -> Tensor:
    """Return ``L^-1 v``.

    Args:
        tril: Lower triangular factors ``(*batch, n, n)``.
        vectors: Vectors ``(*sample, *batch, n)``.

    Returns:
        Vectors of the same shape.
    """
    sample = vectors.shape[: vectors.dim() - tril.dim() + 1]
    columns = vectors.reshape(sample.numel(), *vectors.shape[len(sample) :]).movedim(0, -1)
    solved: Tensor = torch.linalg.solve_triangular(tril, columns, upper=False)
    return solved.movedim(-1, 0).reshape(vectors.shape)
