"""The matrix normal: one covariance for the rows of a weight, one for its columns."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import check_cholesky_factor, check_shape, shape_text
from pyro_structvi.distributions.full import FullNormal
from pyro_structvi.distributions.mean_field import bias_moments
from pyro_structvi.distributions.weight_distribution import WeightDistribution, event_sum
from pyro_structvi.linalg.fused import floored_sqrt
from pyro_structvi.maps.linear_maps import DenseMap, LinearMap


class MatrixNormal(WeightDistribution):
    r"""A normal whose covariance is the Kronecker product of one over rows and one over columns.

    .. math:: W = M + L_r E L_c^\top, \qquad
        \operatorname{Cov}(\operatorname{vec}(W)) = A \otimes B, \qquad
        A = L_r L_r^\top, \quad B = L_c L_c^\top,

    with independent standard normals in ``E (out, in)`` and ``vec`` row by row. The image under ``x``
    is :math:`N(M x, (x^\top B x) A)`: a draw of it takes ``out`` numbers for each example, multiplied
    by :math:`L_r`, and the norm :math:`|L_c^\top x|`.

    Args:
        loc: Means ``M``, ``(*batch, out, *rest)``.
        scale_tril_row: The factor ``L_r``, ``(*batch, out, out)``, with a positive diagonal. Only the
            lower triangle counts.
        scale_tril_column: The factor ``L_c``, ``(*batch, in, in)``, likewise.
        validate_args: Whether to check arguments and the values given to ``log_prob``; Pyro's own
            setting when None.

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

    arg_constraints: ClassVar = {
        "loc": constraints.real,
        "scale_tril_row": constraints.lower_cholesky,
        "scale_tril_column": constraints.lower_cholesky,
    }
    _parameters = ("loc", "scale_tril_row", "scale_tril_column")
    scale_tril_row: Tensor
    scale_tril_column: Tensor

    def __init__(
        self,
        loc: Tensor,
        scale_tril_row: Tensor,
        scale_tril_column: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        batch_dim = scale_tril_row.dim() - 2
        if batch_dim < 0 or loc.dim() - batch_dim < 2:
            raise ValueError(
                "`loc` must have shape (*batch, out, *rest), of a weight of at least two dimensions, "
                f"and `scale_tril_row` (*batch, out, out), but got {shape_text(loc.shape)} and "
                f"{shape_text(scale_tril_row.shape)}."
            )
        factors = {"scale_tril_row": scale_tril_row, "scale_tril_column": scale_tril_column}
        super().__init__({"loc": loc, **factors}, loc.dim() - batch_dim, validate_args)
        if self._validate_args:
            out, size = self._matrix(loc).shape[-2:]
            row, column = (*self.batch_shape, out, out), (*self.batch_shape, size, size)
            check_shape("scale_tril_row", scale_tril_row, row, "(*batch, out, out)")
            check_shape("scale_tril_column", scale_tril_column, column, "(*batch, in, in)")
            for name, factor in factors.items():
                check_cholesky_factor(name, factor)
        self.scale_tril_row = scale_tril_row.tril()
        self.scale_tril_column = scale_tril_column.tril()

    @property
    def _diagonals(self) -> tuple[Tensor, Tensor]:
        """The variances ``A_ii`` and ``B_jj``, ``(*batch_shape, out)`` and ``(*batch_shape, in)``."""
        row, column = self.scale_tril_row, self.scale_tril_column
        return row.square().sum(-1), column.square().sum(-1)

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        rows, columns = self._diagonals
        return (rows.unsqueeze(-1) * columns.unsqueeze(-2)).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, which is the product of the traces of ``A`` and ``B``."""
        rows, columns = self._diagonals
        return rows.sum(-1) * columns.sum(-1)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)``, for small sizes."""
        row, column = self.scale_tril_row, self.scale_tril_column
        product = torch.einsum("...ik,...jl->...ijkl", row @ row.mT, column @ column.mT)
        return product.flatten(-2).flatten(-3, -2)

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        factors = self.scale_tril_row, self.scale_tril_column
        rows, columns = (factor.diagonal(dim1=-2, dim2=-1).log() for factor in factors)
        return 2 * (columns.shape[-1] * rows.sum(-1) + rows.shape[-1] * columns.sum(-1))

    def _mahalanobis(self, difference: Tensor) -> Tensor:
        lead = difference.shape[: difference.dim() - len(self.event_shape)]
        matrix = difference.reshape(*lead, self.event_shape[0], -1)
        rows = torch.linalg.solve_triangular(self.scale_tril_row, matrix, upper=False)
        both = torch.linalg.solve_triangular(
            self.scale_tril_column.mT, rows, upper=True, left=False
        )
        distance: Tensor = both.square().sum((-2, -1))
        return distance

    def _perturbation(self, shape: torch.Size) -> Tensor:
        lead = shape[: len(shape) - len(self.event_shape)]
        noise = _noise([*lead, self.event_shape[0], self.event_shape[1:].numel()], self.loc)
        return (self.scale_tril_row @ noise @ self.scale_tril_column.mT).reshape(shape)

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> WeightDistribution | None:
        """Return the law of ``linear_map(x, W) + bias``; None for a convolution with groups.

        Over the positions of one example the noise is independent: the outputs at a position have
        their exact joint law, correlations between positions are dropped.

        The groups of a convolution see different patches, and their outputs at one position are
        correlated by the product of these patches, not by a norm. Such a weight is drawn.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            bias: Nothing, a tensor ``(out,)``, or the distribution of one with independent elements,
                independent of ``W`` too.

        Returns:
            A normal over the outputs, or None.
        """
        if linear_map.groups > 1:
            return None
        linear_map = self._map_for_batch(linear_map)
        bias_loc, bias_variance = bias_moments(bias)
        loc = linear_map(x, self._matrix(self.loc), bias_loc)
        whitened = linear_map.bank(x, self.scale_tril_column.mT)
        norms = floored_sqrt(
            whitened.to(self.loc.dtype).square().sum(linear_map.channel_dim)
        ).unsqueeze(-1)
        return _MatrixImage(loc, norms, linear_map, self.scale_tril_row, bias_variance)


class _MatrixImage(WeightDistribution):
    """Normals over channels, ``N(loc, norm^2 A + diag(bias_variance))``, one for each position."""

    arg_constraints: ClassVar = {"loc": constraints.real, "norms": constraints.positive}
    _parameters = ("loc", "norms")  # norms have channels last: (*batch, *positions, 1)
    norms: Tensor

    def __init__(
        self,
        loc: Tensor,
        norms: Tensor,
        linear_map: LinearMap,
        row: Tensor,
        bias_variance: Tensor | None,
    ) -> None:
        super().__init__({"loc": loc, "norms": norms}, linear_map.event_dim(loc), False)
        self._channel_dim = linear_map.channel_dim
        self._row, self._bias_variance = row, bias_variance

    @property
    def _by_position(self) -> FullNormal:
        """The same law with channels last, and with positions as batch dimensions."""
        scale_tril = self.norms.unsqueeze(-1) * self._row
        if self._bias_variance is not None:
            independent = torch.diag_embed(self._bias_variance)
            scale_tril = torch.linalg.cholesky(scale_tril @ scale_tril.mT + independent)
        return FullNormal(self.loc.movedim(self._channel_dim, -1), scale_tril, validate_args=False)

    @property
    def _position_dim(self) -> int:
        return len(self.event_shape) - 1

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``(*batch_shape, *event_shape)``."""
        variance = self.norms.square() * self._row.square().sum(-1)
        if self._bias_variance is not None:
            variance = variance + self._bias_variance
        return variance.movedim(-1, self._channel_dim)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)`` for E outputs."""
        blocks = self._by_position.covariance_matrix
        blocks = blocks.reshape(*self.batch_shape, -1, *blocks.shape[-2:])
        identity = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
        order = "piqj" if self._channel_dim == -1 else "ipjq"
        product = torch.einsum(f"...pij,pq->...{order}", blocks, identity)
        return product.flatten(-2).flatten(-3, -2)

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        return event_sum(self._by_position.log_det_covariance, self._position_dim)

    def _mahalanobis(self, difference: Tensor) -> Tensor:
        channels_last = difference.movedim(self._channel_dim, -1)
        return event_sum(self._by_position._mahalanobis(channels_last), self._position_dim)

    def _perturbation(self, shape: torch.Size) -> Tensor:
        channels_last = list(shape)
        channels_last.append(channels_last.pop(self._channel_dim))
        draws = self.norms * DenseMap()(_noise(channels_last, self.loc), self._row)
        if self._bias_variance is not None:
            scale = floored_sqrt(self._bias_variance)
            draws = torch.addcmul(draws, _noise(channels_last, self.loc), scale)
        return draws.movedim(-1, self._channel_dim)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return this law with a larger batch shape, sharing memory."""
        new = super().expand(batch_shape, _instance)
        new._channel_dim = self._channel_dim
        new._row, new._bias_variance = self._row, self._bias_variance
        return new


def _noise(shape: list[int], like: Tensor) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device)
