"""The matrix normal: one covariance over rows and one over columns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import checked
from pyro_structvi.linalg.matrices import floored_sqrt
from pyro_structvi.maps.calls import Arrangement
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import GuideOptions, MatrixFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.parameterization import cholesky_factor, initial_factor
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import Argument
from pyro_structvi.weights.outputs import MixedOutputs
from pyro_structvi.weights.weight_distribution import GaussianWeight, Way


class MatrixNormal(GaussianWeight):
    r"""A normal whose covariance is the Kronecker product of one over rows and one over columns.

    .. math:: W = M + L_r E L_c^\top, \qquad
        \operatorname{Cov}(\operatorname{vec}(W)) = A \otimes B, \qquad
        A = L_r L_r^\top, \quad B = L_c L_c^\top,

    with independent standard normals in ``E (out, in)`` and ``vec`` row by row. The image under ``x``
    is :math:`N(M x, (x^\top B x) A)`.

    Args:
        loc: Means ``M``, ``(*batch, out, *rest)``.
        scale_tril_row: The lower triangular factor ``L_r``, ``(*batch, out, out)``, with a positive
            diagonal; where it is not checked, its upper triangle is ignored.
        scale_tril_column: The factor ``L_c``, ``(*batch, in, in)``, likewise.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a factor is not lower triangular with a
            positive diagonal.

    Example:
        >>> row = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> q = MatrixNormal(torch.zeros(2, 2), row, torch.diag(torch.tensor([1.0, 2.0])))
        >>> q.variance
        tensor([[ 1.,  4.],
                [13., 52.]])
        >>> q.image(torch.tensor([1.0, 0.0])).covariance_matrix
        tensor([[ 1.,  3.],
                [ 3., 13.]])

    References:
        Gupta and Nagar (2000), "Matrix variate distributions", chapter 2; Louizos and Welling (2016),
        "Structured and efficient variational deep learning with matrix Gaussian posteriors".
    """

    scale_tril_row: Annotated[Tensor, Argument("out, out", constraints.lower_cholesky)]
    scale_tril_column: Annotated[Tensor, Argument("in, in", constraints.lower_cholesky)]

    def __init__(
        self,
        loc: Tensor,
        scale_tril_row: Tensor,
        scale_tril_column: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        factors = {"scale_tril_row": scale_tril_row, "scale_tril_column": scale_tril_column}
        super().__init__({"loc": loc, **factors}, validate_args=validate_args)
        self.scale_tril_row = scale_tril_row.tril()
        self.scale_tril_column = scale_tril_column.tril()

    @property
    def _diagonals(self) -> tuple[Tensor, Tensor]:
        """The variances ``A_ii`` and ``B_jj``, ``(*batch_shape, out)`` and ``(*batch_shape, in)``."""
        row, column = self.scale_tril_row, self.scale_tril_column
        return row.square().sum(-1), column.square().sum(-1)

    @property
    def variance(self) -> Tensor:
        rows, columns = self._diagonals
        return (rows.unsqueeze(-1) * columns.unsqueeze(-2)).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        rows, columns = self._diagonals
        return rows.sum(-1) * columns.sum(-1)

    @property
    def log_det_covariance(self) -> Tensor:
        factors = self.scale_tril_row, self.scale_tril_column
        rows, columns = (factor.diagonal(dim1=-2, dim2=-1).log() for factor in factors)
        return 2 * (columns.shape[-1] * rows.sum(-1) + rows.shape[-1] * columns.sum(-1))

    def scale_noise(self, noise: Tensor) -> Tensor:
        scaled = self.scale_tril_row @ self.as_matrix(noise) @ self.scale_tril_column.mT
        return self.as_weight(scaled)

    def whiten(self, difference: Tensor) -> Tensor:
        matrix = self.as_matrix(difference)
        rows = torch.linalg.solve_triangular(self.scale_tril_row, matrix, upper=False)
        both = torch.linalg.solve_triangular(
            self.scale_tril_column.mT, rows, upper=True, left=False
        )
        return self.as_weight(both)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        # Groups have different patches, whose products correlate their outputs.
        return ("outputs", "weight") if linear_map.groups == 1 else ("weight",)

    def spread(self, moment: Tensor) -> Tensor:
        columns = self.scale_tril_column @ self.scale_tril_column.mT
        traces = (columns * moment).sum((-2, -1), keepdim=True)
        return traces * (self.scale_tril_row @ self.scale_tril_row.mT)

    def image_around(self, mean: Tensor, linear_map: LinearMap, x: Tensor) -> MixedOutputs:
        """Return normals that are correlated over channels, and independent over positions."""
        whitened = linear_map.bank(x, self.scale_tril_column.mT)
        squares = whitened.to(self.loc.dtype).square().sum(linear_map.channel_dim)
        norms = floored_sqrt(squares).unsqueeze(-1)
        return MixedOutputs(linear_map, mean, norms, self.scale_tril_row)

    @checked
    def rearranged(self, arrangement: Arrangement) -> "MatrixNormal | None":
        if not arrangement.is_transpose:
            return None
        factors = self.scale_tril_column, self.scale_tril_row
        return MatrixNormal(arrangement(self.loc), *factors, validate_args=False)


@dataclass(frozen=True)
class MatrixNormalFamily(MatrixFamily):
    """Normals with one covariance over the outputs of a layer and one over its inputs.

    Parameters are ``loc`` and the Cholesky factors of both covariances: ``row_log_diagonal (out,)``
    and ``row_lower (out (out - 1) / 2,)``, the entries below the diagonal divided by the row's
    diagonal entry; for columns likewise.

    Args:
        join_bias: Whether a layer's bias is a further column of its weight, as by default.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": MatrixNormalFamily()})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        36
    """

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with the covariance ``scale^2`` times the identity, ``scale`` on each side."""
        parameters = {"loc": loc.clone()}
        for side, size in (("row", loc.shape[0]), ("column", loc[0].numel())):
            log_diagonal, lower = initial_factor(size, math.sqrt(scale), loc)
            parameters |= {f"{side}_log_diagonal": log_diagonal, f"{side}_lower": lower}
        return parameters

    def distribution(self, site: LatentSite, **parameters: Tensor) -> MatrixNormal:
        row, column = (
            cholesky_factor(parameters[f"{side}_log_diagonal"], parameters[f"{side}_lower"])
            for side in ("row", "column")
        )
        return MatrixNormal(parameters["loc"], row, column, validate_args=False)


class MatrixNormalGuide(StructuredGuide):
    """The matrix normal (Louizos and Welling, 2016) at every weight, mean field at vectors.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MatrixNormalGuide(model).parameters())
        320400
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": MatrixNormalFamily(join_bias=join_bias)}, **options)
