"""The k-tied Normal: standard deviations of rank k."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import Count, checked
from pyro_structvi.linalg.matrices import sum_of_logs
from pyro_structvi.maps.calls import Arrangement
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import GuideOptions, MatrixFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.weights.arguments import Argument
from pyro_structvi.weights.weight_distribution import IndependentWeight


class KTiedNormal(IndependentWeight):
    r"""Independent normals with :math:`\sigma = R C^\top`, ``R (out, k)`` and ``C (in, k)``.

    The elementwise square of a matrix of rank k has at most rank k(k+1)/2,

    .. math:: \sigma_{ij}^2 = \sum_{a \le b} c_{ab} (R_{ia} R_{ib}) (C_{ja} C_{jb}),
        \qquad c_{ab} = 1 \text{ if } a = b \text{ else } 2,

    so the variance of the image takes (out + in) k(k+1)/2 products for each example instead of
    out x in. With k = 1 it is the matrix normal with diagonal factors.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        row_scale: ``R``, ``(*batch, out, k)``, positive.
        column_scale: ``C``, ``(*batch, in, k)``, positive.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

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
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 3 of the
        submission to ICLR 2020.
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
        return self.row_scale.shape[-1]

    @property
    def stddev(self) -> Tensor:
        return (self.row_scale @ self.column_scale.mT).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        rows = self.row_scale.mT @ self.row_scale
        columns = self.column_scale.mT @ self.column_scale
        return (rows * columns).sum((-2, -1))

    @property
    def log_det_covariance(self) -> Tensor:
        if self.rank > 1:
            return 2 * sum_of_logs(self.row_scale, self.column_scale)
        rows, columns = self.row_scale.squeeze(-1), self.column_scale.squeeze(-1)
        return 2 * (columns.shape[-1] * rows.log().sum(-1) + rows.shape[-1] * columns.log().sum(-1))

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        # For groups of few outputs, as in depthwise convolutions, one call with the dense variances is
        # faster than two calls with factors.
        products = self.rank * (self.rank + 1) // 2
        if len(self.loc) <= products * linear_map.groups and not self.batch_shape:
            return linear_map(x * x, self.as_matrix(self.stddev.square()))
        hidden = linear_map.bank(x * x, _pairwise_products(self.column_scale))
        mixing = _pairwise_products(self.row_scale, off_diagonal=2.0).mT
        return linear_map.mix(hidden, mixing)

    @checked
    def rows(self, index: Tensor) -> MeanFieldNormal:
        loc, row_scale = (F.embedding(index, table) for table in (self.loc, self.row_scale))
        scale = row_scale @ self.column_scale.mT
        return MeanFieldNormal(loc, scale, event_dim=2, validate_args=False)

    @checked
    def rearranged(self, arrangement: Arrangement) -> IndependentWeight:
        """Return the distribution in another order: k-tied for a transpose, else mean field."""
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


@dataclass(frozen=True)
class KTied(MatrixFamily):
    """Normals whose standard deviations form a matrix of rank k; out + in numbers for each rank.

    Parameters are ``loc``, ``log_row_scale (out, k)`` and ``log_column_scale (in, k)``.

    Args:
        rank: The k of the paper, a whole number of at least 1.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": KTied(rank=1)})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        23
    """

    rank: Count = 2

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start both factors at ``(log(scale) - log(k)) / 2`` plus N(0, 0.1^2) noise."""
        start = (math.log(scale) - math.log(self.rank)) / 2
        out, size = loc.shape[0], loc[0].numel()
        return {
            "loc": loc.clone(),
            "log_row_scale": start + 0.1 * loc.new_empty(out, self.rank).normal_(),
            "log_column_scale": start + 0.1 * loc.new_empty(size, self.rank).normal_(),
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> KTiedNormal:
        rows, columns = parameters["log_row_scale"].exp(), parameters["log_column_scale"].exp()
        return KTiedNormal(parameters["loc"], rows, columns, validate_args=False)


class KTiedGuide(StructuredGuide):
    """The k-tied Normal (Swiatkowski et al., 2020) at every weight, mean field at vectors.

    In the paper, k = 2 is about as good as mean field, and k = 1 is worse for some nets.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        rank: The rank k of each matrix of standard deviations.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in KTiedGuide(model, rank=2).parameters())
        162002
    """

    def __init__(
        self,
        model: Callable[..., Any],
        rank: int = 2,
        *,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": KTied(rank, join_bias=join_bias)}, **options)
