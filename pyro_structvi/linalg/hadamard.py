"""The fast Walsh-Hadamard transform, as a few products with small matrices."""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import shape_text

_LARGEST_FACTOR_BITS = 5


def walsh_hadamard_transform(x: Tensor) -> Tensor:
    r"""Multiply the last dimension by the orthonormal Walsh-Hadamard matrix, in natural order.

    The matrix is :math:`H_1 = 1`, :math:`H_{2m} = \begin{pmatrix} H_m & H_m \\ H_m & -H_m
    \end{pmatrix} / \sqrt{2}`. It is symmetric and its own inverse, and so is the transform; the
    gradient is the transform of the gradient. Since :math:`H_{rm} = H_r \otimes H_m`, a vector of D
    numbers takes products with matrices of at most 32 rows along one axis at a time, O(D log D) in
    all. Torch does these faster than the log2(D) sums and differences of the textbook.

    Args:
        x: Vectors ``(*batch, D)`` with ``D`` a power of two.

    Returns:
        Their transforms, of the same shape.

    Raises:
        ValueError: If ``D`` is not a power of two.

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
    """Split a power of two into as few factors as may be, alike in size."""
    bits = size.bit_length() - 1
    count = max(math.ceil(bits / _LARGEST_FACTOR_BITS), 1)
    return [2 ** ((bits + index) // count) for index in range(count)]


@cache
def _hadamard_matrix(size: int) -> np.ndarray:
    """Return the orthonormal matrix of a power of two; an array, which belongs to no device."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)
