"""What the distribution of a weight is given the inputs that it meets at chosen points."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.linalg.matrices import solve_lower
from pyro_structvi.linalg.precision import autocast_off
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.weights.weight_distribution import GaussianWeight

OF_DRAWS = (
    "A weight that is drawn given its inputs has no distribution by itself. Take `guide.draw()`, or for "
    "its distribution at the inputs `rows (rows, in)` its `given(rows)`."
)


class NormalGivenInputs(TorchDistribution):
    r"""A weight whose distribution depends on the inputs ``X (rows, in)`` that it meets.

    It is what a Bayesian linear regression on X would give, for outputs V that were never observed:

    .. math:: W_{i \cdot} \mid X \sim N(S X^\top \Lambda V_{\cdot i}, S), \qquad
        S^{-1} = \operatorname{diag}(s)^{-2} + X^\top \Lambda X,

    independent over rows i, with a precision for each row of X in the diagonal of :math:`\Lambda`, which
    may be another for each i. By itself it has no draws and no density: the layers before decide what X
    is.

    Args:
        event_shape: The weight's shape, ``(out, *rest)``.
        target: The outputs V, ``(rows, out)``.
        log_precision: Logarithms of the precisions, ``(rows,)``, or ``(rows, out)``.
        log_scale: Logarithms of the standard deviations s without any row, ``(in,)``.

    References:
        Ober and Aitchison (2021), "Global inducing point variational posteriors for Bayesian neural
        networks and deep Gaussian processes".
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"log_scale": constraints.real}
    has_rsample = False

    def __init__(
        self,
        event_shape: torch.Size,
        target: Tensor,
        log_precision: Tensor,
        log_scale: Tensor,
    ) -> None:
        super().__init__(torch.Size(), event_shape, validate_args=False)
        self.target, self.log_precision, self.log_scale = target, log_precision, log_scale

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """Every real tensor of the event shape."""
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def mean(self) -> Tensor:
        """Refuse."""
        raise NotImplementedError(OF_DRAWS)

    @property
    def variance(self) -> Tensor:
        """Refuse."""
        raise NotImplementedError(OF_DRAWS)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Refuse."""
        raise NotImplementedError(OF_DRAWS)

    def log_prob(self, value: Tensor) -> Tensor:
        """Refuse."""
        raise NotImplementedError(OF_DRAWS)

    def condition(self, rows: Tensor) -> GaussianWeight:
        """Return the distribution of the weight that meets these inputs ``(rows, in)``.

        Precisions are those of many observations, so all is computed in double. What is factored has the
        size of the rows or of the inputs, whichever are fewer.
        """
        with autocast_off(rows):
            scale = self.log_scale.double().exp()
            root = (0.5 * self.log_precision.double()).exp()
            if root.dim() == 2:
                return self._of_own_precisions(rows.double() * scale, root, scale)
            root = root.unsqueeze(-1)
            weighted, target = rows.double() * scale * root, root * self.target.double()
            make = _of_few_rows if len(rows) < len(scale) else _of_many_rows
            return make(self.event_shape, weighted, target, scale, self.log_scale.dtype)

    def _of_own_precisions(self, rows: Tensor, root: Tensor, scale: Tensor) -> GaussianWeight:
        """Factor one covariance for each output; rows ``(rows, in)`` are of inputs of unit scale."""
        weighted = root.mT.unsqueeze(-1) * rows
        target = (root * self.target.double()).mT.unsqueeze(-1)
        column = _column(weighted)
        loc = column @ (column.mT @ (weighted.mT @ target))
        loc, column = scale * loc.squeeze(-1), scale.unsqueeze(-1) * column
        dtype = self.log_scale.dtype
        return RowwiseNormal(loc.to(dtype).reshape(self.event_shape), column.to(dtype), False)


def _of_many_rows(
    event_shape: torch.Size, weighted: Tensor, target: Tensor, scale: Tensor, dtype: torch.dtype
) -> GaussianWeight:
    """Factor the covariance over inputs; rows ``(rows, in)`` have unit precision, inputs unit scale."""
    column = _column(weighted)
    loc = (scale.unsqueeze(-1) * (column @ (column.mT @ (weighted.mT @ target)))).mT
    column = scale.unsqueeze(-1) * column
    return _ManyRows(loc.to(dtype).reshape(event_shape), column.to(dtype))


def _column(weighted: Tensor) -> Tensor:
    """Return a lower triangular factor of ``(I + X' X)^-1`` for inputs ``X (*, rows, in)``."""
    identity = _identity(weighted[..., 0, :])
    precision = identity + weighted.mT @ weighted
    # A factor from the last element on, whose inverse is the covariance's from the first.
    inverse = torch.linalg.solve_triangular(_factor(precision.flip(-2, -1)), identity, upper=False)
    column: Tensor = inverse.flip(-2, -1).mT
    return column


def _of_few_rows(
    event_shape: torch.Size, weighted: Tensor, target: Tensor, scale: Tensor, dtype: torch.dtype
) -> GaussianWeight:
    """Factor a matrix of the rows, by Woodbury's identity."""
    tril = _factor(_identity(weighted[:, 0]) + weighted @ weighted.mT)
    both = torch.linalg.solve_triangular(tril, torch.cat([weighted, target], -1), upper=False)
    whitened, seen = both.split([len(scale), target.shape[-1]], -1)
    loc = (scale.unsqueeze(-1) * (whitened.mT @ seen)).mT
    return _FewRows(loc.to(dtype).reshape(event_shape), weighted, scale, tril, whitened)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _factor(matrix: Tensor) -> Tensor:
    """Return a Cholesky factor, of NaN where inputs are not finite, without waiting for a GPU."""
    tril, info = torch.linalg.cholesky_ex(matrix)
    masked: Tensor = tril.masked_fill((info > 0)[..., None, None], torch.nan)
    return masked


class _EqualRows(GaussianWeight, abstract=True):
    """Independent rows of one covariance; a subclass says which, and scales the noise of rows."""

    _row_variance: Tensor
    _row_log_det: Tensor
    _like: Tensor  # (in, ...), of the precision of the factor

    def _scaled(self, noise: Tensor) -> Tensor:
        """Return rows ``(*, in)`` of noise times the transposed factor of the covariance."""
        raise NotImplementedError

    @property
    def variance(self) -> Tensor:
        row: Tensor = self._row_variance.to(self.loc.dtype)
        return row.expand(len(self.loc), -1).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        total: Tensor = len(self.loc) * self._row_variance.sum()
        return total.to(self.loc.dtype)

    @property
    def log_det_covariance(self) -> Tensor:
        return (len(self.loc) * self._row_log_det).to(self.loc.dtype)

    def scale_noise(self, noise: Tensor) -> Tensor:
        rows = self.as_matrix(noise).to(self._like.dtype)
        return self.as_weight(self._scaled(rows).to(self.loc.dtype))

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        images = linear_map.bank(x, self._scaled(_identity(self._like)).to(x))
        shared: Tensor = images.square().sum(linear_map.channel_dim, keepdim=True)
        return shared.repeat_interleave(len(self.loc), linear_map.channel_dim)


class _ManyRows(_EqualRows):
    """Rows of covariance ``L L'``.

    Args:
        loc: Means.
        column: L, ``(in, in)``, lower triangular.
    """

    arg_constraints: ClassVar[dict[str, Any]] = dict.fromkeys(("loc", "column"), constraints.real)

    def __init__(self, loc: Tensor, column: Tensor) -> None:
        own = {"loc": loc, "column": column}
        super().__init__(own, event_dim=loc.dim(), validate_args=False)

    @property
    def _like(self) -> Tensor:  # type: ignore[override]
        like: Tensor = self.column
        return like

    @property
    def _row_variance(self) -> Tensor:  # type: ignore[override]
        variance: Tensor = self.column.square().sum(-1)
        return variance

    @property
    def _row_log_det(self) -> Tensor:  # type: ignore[override]
        logs: Tensor = self.column.diagonal().log()
        return 2 * logs.sum()

    def _scaled(self, noise: Tensor) -> Tensor:
        scaled: Tensor = noise @ self.column.mT
        return scaled

    def whiten(self, difference: Tensor) -> Tensor:
        return self.as_weight(solve_lower(self.column, self.as_matrix(difference)))


class _FewRows(_EqualRows):
    r"""Rows of covariance ``D (I + Y' Y)^-1 D``, where Y has fewer rows than columns.

    With the Cholesky factor L of :math:`I + Y Y^\top` it is :math:`D A A^\top D` with
    :math:`A = I - Y^\top L^{-\top} (I + L)^{-1} Y`, and the determinant is that of the factor.

    Args:
        loc: Means.
        inputs: Y, ``(rows, in)``, in double precision.
        scale: The diagonal of D, ``(in,)``.
        tril: L.
        whitened: ``L^-1 Y``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("loc", "inputs", "scale", "tril", "whitened"), constraints.real
    )

    def __init__(
        self, loc: Tensor, inputs: Tensor, scale: Tensor, tril: Tensor, whitened: Tensor
    ) -> None:
        own = {"loc": loc, "inputs": inputs, "scale": scale, "tril": tril, "whitened": whitened}
        super().__init__(own, event_dim=loc.dim(), validate_args=False)

    @property
    def _like(self) -> Tensor:  # type: ignore[override]
        like: Tensor = self.scale
        return like

    @property
    def _row_variance(self) -> Tensor:  # type: ignore[override]
        seen: Tensor = self.whitened.square().sum(-2)
        variance: Tensor = self.scale.square() * (1 - seen)
        return variance

    @property
    def _row_log_det(self) -> Tensor:  # type: ignore[override]
        logs: Tensor = self.scale.log().sum() - self.tril.diagonal().log().sum()
        return 2 * logs

    def _scaled(self, noise: Tensor) -> Tensor:
        identity = _identity(self.tril)
        gain = torch.linalg.solve_triangular((self.tril + identity).mT, self.whitened, upper=True)
        scaled: Tensor = (noise - (noise @ self.inputs.mT) @ gain) * self.scale
        return scaled

    def mahalanobis(self, difference: Tensor) -> Tensor:
        rows = self.as_matrix(difference).double() / self.scale
        seen = rows @ self.inputs.mT
        squares: Tensor = rows.square().sum((-2, -1)) + seen.square().sum((-2, -1))
        return squares.to(self.loc.dtype)


def already_drawn(distribution: Any, value: Tensor) -> Any:
    """Return a distribution whose one draw is made already: ``rsample`` returns the value.

    Args:
        distribution: The distribution that the value was drawn from.
        value: The draw.
    """
    known = copy.copy(distribution)

    def drawn(sample_shape: Any = ()) -> Tensor:
        if sample_shape:
            raise NotImplementedError("There is one draw, which later layers were drawn given.")
        return value

    # Of this object, since its class decides what its divergence to a prior is.
    known.__dict__.update(rsample=drawn, sample=drawn, draw_factored=lambda: _FormedDraw(value))
    return known


@dataclass(frozen=True)
class _FormedDraw:
    """A sampled weight, with the methods of samples in factors."""

    value: Tensor

    def weight(self) -> Tensor:
        return self.value

    def apply(self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_map(x, self.value.flatten(1), bias)
