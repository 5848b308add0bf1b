"""The k-tied Normal: independent normals whose standard deviations form a matrix of rank k."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import checked
from pyro_structvi.distributions.arguments import Argument, check_index
from pyro_structvi.distributions.independent import IndependentWeight
from pyro_structvi.distributions.mean_field import MeanFieldNormal
from pyro_structvi.distributions.outputs import NormalOutputs, square
from pyro_structvi.linalg.sum_of_logs import sum_of_logs
from pyro_structvi.maps import Arrangement, LinearMap


class KTiedNormal(IndependentWeight):
    r"""Independent normals with :math:`\sigma = R C^\top`, ``R (out, k)`` and ``C (in, k)``.

    The elementwise square of a matrix of rank k has rank k(k+1)/2,

    .. math:: \sigma_{ij}^2 = \sum_{a \le b} c_{ab} (R_{ia} R_{ib}) (C_{ja} C_{jb}),
        \qquad c_{ab} = 1 \text{ if } a = b \text{ else } 2,

    so that the variance of the image takes thin products only, (out + in) k(k+1)/2 per example
    instead of out x in. With k = 1 it is the matrix normal with diagonal factors.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        row_scale: ``R``, ``(*batch, out, k)``, positive.
        column_scale: ``C``, ``(*batch, in, k)``, positive.
        validate_args: Whether to check arguments and the values given to ``log_prob``; Pyro's own
            setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a scale is not positive.

    Example:
        >>> q = KTiedNormal(torch.zeros(2, 3), torch.full((2, 1), 0.5), torch.full((3, 1), 2.0))
        >>> q.stddev
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
        >>> q.image(torch.tensor([3.0, 0.0, 4.0])).variance
        tensor([25., 25.])

    References:
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 3.
    """

    row_scale: Annotated[Tensor, Argument("out, k", constraints.positive)]
    column_scale: Annotated[Tensor, Argument("in, k", constraints.positive)]

    def __init__(
        self,
        loc: Tensor,
        row_scale: Tensor,
        column_scale: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        parameters = {"loc": loc, "row_scale": row_scale, "column_scale": column_scale}
        super().__init__(parameters, validate_args=validate_args)

    @property
    def rank(self) -> int:
        """The rank k of the matrix of standard deviations."""
        return self.row_scale.shape[-1]

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of each weight, ``(*batch_shape, *event_shape)``."""
        return (self.row_scale @ self.column_scale.mT).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, which is ``sum((R'R) * (C'C))``, of k x k matrices."""
        rows = self.row_scale.mT @ self.row_scale
        columns = self.column_scale.mT @ self.column_scale
        return (rows * columns).sum((-2, -1))

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats.

        The one term whose cost is out x in; with k = 1 not even that.
        """
        if self.rank > 1:
            return 2 * sum_of_logs(self.row_scale, self.column_scale)
        rows, columns = self.row_scale.squeeze(-1), self.column_scale.squeeze(-1)
        return 2 * (columns.shape[-1] * rows.log().sum(-1) + rows.shape[-1] * columns.log().sum(-1))

    def image_around(
        self, mean: Tensor, linear_map: LinearMap, x: Tensor, bias_variance: Tensor | None
    ) -> NormalOutputs:
        """Return the distribution of the outputs: independent normals.

        Where a group has no more outputs than there are products of columns, as in a depthwise
        convolution, one call with all variances is less than two with their factors.
        """
        products = self.rank * (self.rank + 1) // 2
        if len(self.loc) <= products * linear_map.groups and not self.batch_shape:
            variances = self.as_matrix(self.stddev.square())
            return NormalOutputs(linear_map, mean, linear_map(square(x), variances, bias_variance))
        hidden = linear_map.bank(square(x), _pairwise_products(self.column_scale))
        mixing = _pairwise_products(self.row_scale, off_diagonal=2.0).mT
        variance = linear_map.mix(hidden, mixing, bias_variance)
        return NormalOutputs(linear_map, mean, variance)

    def rows(self, index: Tensor) -> MeanFieldNormal:
        """Return the distribution of rows ``W[index]``: independent normals."""
        check_index(self, index)
        loc, row_scale = (F.embedding(index, table) for table in (self.loc, self.row_scale))
        scale = row_scale @ self.column_scale.mT
        return MeanFieldNormal(loc, scale, event_dim=2, validate_args=False)

    @checked
    def rearranged(self, arrangement: Arrangement) -> IndependentWeight:
        """Return the distribution in another order: of the transpose k-tied, else independent."""
        loc = arrangement(self.loc)
        if arrangement.is_transpose:
            return KTiedNormal(loc, self.column_scale, self.row_scale, validate_args=False)
        scale = arrangement(self.stddev)
        return MeanFieldNormal(loc, scale, arrangement.event_dim, validate_args=False)


def _pairwise_products(factor: Tensor, off_diagonal: float = 1.0) -> Tensor:
    """Return ``c_ab F_a F_b`` for a <= b, turning ``(*b, n, k)`` into ``(*b, k (k + 1) / 2, n)``."""
    columns = factor.unbind(-1)
    products = [
        column * other if a == b else off_diagonal * column * other
        for a, column in enumerate(columns)
        for b, other in enumerate(columns[a:], start=a)
    ]
    return torch.stack(products, -2)
