"""A normal with a full covariance within each row of a weight; rows are independent."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.distributions.arguments import Argument, check_index
from pyro_structvi.distributions.gaussian_weight import GaussianWeight
from pyro_structvi.linalg.triangular import solve_lower
from pyro_structvi.maps import LinearMap


class RowwiseNormal(GaussianWeight):
    r"""A normal with one full covariance over the inputs of each output.

    .. math:: W_{i \cdot} \sim N(\mu_i, L_i L_i^\top), \qquad \text{independent over } i,

    with a lower triangular ``L_i (in, in)`` for each row i. Its image under ``x`` has independent
    outputs with the variances :math:`|L_i^\top x|^2`, which are exact. Under a convolution, with or
    without groups, each output has its exact distribution.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        scale_tril: The factors ``L_i``, ``(*batch, out, in, in)``, with positive diagonals. Only the
            lower triangles count.
        validate_args: Whether to check arguments and the values given to ``log_prob``; Pyro's own
            setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a factor is not lower triangular with a
            positive diagonal.

    Example:
        >>> rows = torch.tensor([[[1.0, 0.0], [3.0, 2.0]], [[1.0, 0.0], [0.0, 4.0]]])
        >>> q = RowwiseNormal(torch.zeros(2, 2), rows)
        >>> q.variance
        tensor([[ 1., 13.],
                [ 1., 16.]])
        >>> q.image(torch.tensor([3.0, -1.0])).variance
        tensor([ 4., 25.])

    References:
        Rossi and Filippone, tutorial on variational inference, the "column-wise" posterior; layers
        are written x W there.
    """

    scale_tril: Annotated[Tensor, Argument("out, in, in", constraints.lower_cholesky)]

    def __init__(self, loc: Tensor, scale_tril: Tensor, validate_args: bool | None = None) -> None:
        super().__init__({"loc": loc, "scale_tril": scale_tril}, validate_args=validate_args)
        self.scale_tril = scale_tril.tril()

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        return self.scale_tril.square().sum(-1).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, ``(*batch_shape,)``."""
        return self.scale_tril.square().sum((-3, -2, -1))

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        return 2 * self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1))

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Return ``L_i e_i`` for each row i."""
        rows = torch.einsum("...ij,...ikj->...ik", self.as_matrix(noise), self.scale_tril)
        return self.as_weight(rows)

    def whiten(self, difference: Tensor) -> Tensor:
        """Return ``L_i^-1 d_i`` for each row i."""
        return self.as_weight(solve_lower(self.scale_tril, self.as_matrix(difference)))

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        """Return the variances of the outputs.

        Over the outputs at one position they are exactly independent, since rows are. Correlations
        between positions are dropped.
        """
        out, size = self.scale_tril.shape[-3:-1]
        channel_dim, filters = linear_map.channel_dim, self.scale_tril.mT.flatten(-3, -2)
        whitened = linear_map(x, filters).unflatten(channel_dim, (out, size))
        norms = torch.linalg.vector_norm(whitened, dim=channel_dim, dtype=self.loc.dtype)
        variance: Tensor = norms.square()
        return variance

    def spread(self, moment: Tensor) -> Tensor:
        """Return the diagonal matrices of ``tr(L_i' S L_i)``."""
        covariances = self.scale_tril @ self.scale_tril.mT
        return torch.diag_embed(torch.einsum("iab,...ab->...i", covariances, moment))

    def rows(self, index: Tensor) -> "RowwiseNormal":
        """Return the distribution of rows ``W[index]``: a full covariance within each."""
        check_index(self, index)
        factors = F.embedding(index, self.scale_tril.flatten(1))
        scale_tril = factors.unflatten(-1, self.scale_tril.shape[1:])
        return RowwiseNormal(F.embedding(index, self.loc), scale_tril, validate_args=False)
