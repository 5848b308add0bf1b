"""Nodes of quadrature over a net's random output."""

import torch
from torch import Tensor

from pyro_structvi.linalg.quadrature import gauss_hermite, normal_points
from pyro_structvi.moments.random_tensor import RandomTensor

NODES = {1: 32, 2: 16}  # along each variable, by how many variables there are
POINTS = 256  # for more variables than that
LARGEST_OUTPUT = torch.quasirandom.SobolEngine.MAXDIM
LARGEST_JOINT = 128  # outputs whose covariance is formed


def nodes_of(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes ``(count, size)`` and their weights ``(count,)``.

    Args:
        size: How many variables there are.
        like: A tensor of their dtype and device.

    Raises:
        NotImplementedError: If there are more variables than quasi-random points have dimensions.
    """
    if size > LARGEST_OUTPUT:
        raise NotImplementedError(
            f"Moments have nodes for up to {LARGEST_OUTPUT:,} logits, but there are {size:,}. Predict "
            "with draws."
        )
    if size not in NODES:
        return normal_points(POINTS, size, like)
    line, weights = gauss_hermite(NODES[size], like)
    grid = torch.cartesian_prod(*(line for _ in range(size))).reshape(-1, size)
    products = torch.cartesian_prod(*(weights for _ in range(size))).reshape(-1, size)
    return grid, products.prod(-1)


def joint_covariance(output: RandomTensor) -> Tensor | None:
    """Return the covariance between outputs, if it is known and small."""
    if output.covariance is not None:
        return output.covariance
    if output.form_covariance is None or output.shape[-1] > LARGEST_JOINT:
        return None
    return output.form_covariance()
