"""Weights given their inputs at inducing points."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.linalg.factorizations import tril_or_nan
from pyro_structvi.linalg.matrices import autocast_off, identity_like
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.weights.weight_distribution import GaussianWeight


class NormalGivenInputs(TorchDistribution):
    r"""The posterior of a Bayesian linear regression of pseudo-outputs V on inputs ``X (rows, in)``.

    .. math:: W_{i \cdot} \mid X \sim N(S X^\top \Lambda V_{\cdot i}, S), \qquad
        S^{-1} = \operatorname{diag}(s)^{-2} + X^\top \Lambda X,

    independent over rows i. It has no draws and no density without X.

    Args:
        event_shape: The weight's shape, ``(out, *rest)``.
        target: The pseudo-outputs V, ``(rows, out)``.
        log_precision: The logarithm of :math:`\Lambda`, ``(rows,)`` or for each i ``(rows, out)``.
        log_scale: Logarithms of the standard deviations s without any row, ``(in,)``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"log_scale": constraints.real}
    has_rsample = False

    def __init__(
        self, event_shape: torch.Size, target: Tensor, log_precision: Tensor, log_scale: Tensor
    ) -> None:
        super().__init__(torch.Size(), event_shape, validate_args=False)
        self.target, self.log_precision, self.log_scale = target, log_precision, log_scale

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        return constraints.independent(constraints.real, len(self.event_shape))

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError(
            "A weight that is drawn given its inputs has no marginal distribution. Use `guide.draw()`, "
            "or `condition(rows)` for its distribution given the inputs `rows (rows, in)`."
        )

    mean = variance = property(_refuse)
    rsample = log_prob = _refuse

    def condition(self, rows: Tensor) -> GaussianWeight:
        """Return the distribution given inputs ``(rows, in)``, computed in double precision."""
        dtype, shape = self.log_scale.dtype, self.event_shape
        with autocast_off(rows):
            scale = self.log_scale.double().exp()
            root = (0.5 * self.log_precision.double()).exp()
            rows, target = rows.double() * scale, self.target.double()
            if root.dim() == 2:
                root = root.mT.unsqueeze(-1)
                loc, column = _regress(root * rows, root * target.mT.unsqueeze(-1), scale)
                loc = loc.squeeze(-1).to(dtype).reshape(shape)
                return RowwiseNormal(loc, column.to(dtype), False)
            rows, target = root.unsqueeze(-1) * rows, root.unsqueeze(-1) * target
            if len(rows) < len(scale):
                return _regress_few_rows(shape, rows, target, scale, dtype)
            loc, column = _regress(rows, target, scale)
            loc = loc.mT.to(dtype).reshape(shape)
            return MatrixNormal(loc, torch.eye(len(loc)).to(loc), column.to(dtype), False)


def _regress(rows: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``(*, in, out)`` and covariance factor ``(*, in, in)``, for unit precisions."""
    precision = rows.mT @ rows
    identity = identity_like(precision)
    # Reversed elements give a lower triangular factor of the covariance without a factorization of it.
    tril = tril_or_nan((identity + precision).flip(-2, -1))
    inverse = torch.linalg.solve_triangular(tril, identity, upper=False)
    column = inverse.flip(-2, -1).mT
    loc, scale = column @ (column.mT @ (rows.mT @ target)), scale.unsqueeze(-1)
    return scale * loc, scale * column


def _regress_few_rows(
    shape: torch.Size, rows: Tensor, target: Tensor, scale: Tensor, dtype: torch.dtype
) -> GaussianWeight:
    """Return the distribution by Woodbury's identity, with a factor of the size of the rows."""
    gram = rows @ rows.mT
    tril = tril_or_nan(identity_like(gram) + gram)
    both = torch.linalg.solve_triangular(tril, torch.cat([rows, target], -1), upper=False)
    whitened, seen = both.split([len(scale), target.shape[-1]], -1)
    loc = (scale.unsqueeze(-1) * (whitened.mT @ seen)).mT
    return _FewRows(loc.to(dtype).reshape(shape), rows, scale, tril, whitened)


class _FewRows(GaussianWeight):
    r"""Independent rows of covariance ``D (I + Y' Y)^-1 D``, for Y with fewer rows than columns.

    With the Cholesky factor L of :math:`I + Y Y^\top` it is :math:`D A A^\top D` with :math:`A = I -
    Y^\top L^{-\top} (I + L)^{-1} Y`. Here ``inputs`` is Y, ``scale`` the diagonal of D, ``tril`` is
    L, and ``whitened`` is :math:`L^{-1} Y`, all in double precision.
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
    def _row_variance(self) -> Tensor:
        variance: Tensor = self.scale.square() * (1 - self.whitened.square().sum(-2))
        return variance

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
        logs: Tensor = self.scale.log().sum() - self.tril.diagonal().log().sum()
        return (2 * len(self.loc) * logs).to(self.loc.dtype)

    def scale_noise(self, noise: Tensor) -> Tensor:
        rows = self.as_matrix(noise).to(self.scale.dtype)
        return self.as_weight(self._scaled(rows).to(self.loc.dtype))

    def _scaled(self, noise: Tensor) -> Tensor:
        """Return ``e A D`` for rows e of noise ``(*, in)``."""
        upper = (self.tril + identity_like(self.tril)).mT
        gain = torch.linalg.solve_triangular(upper, self.whitened, upper=True)
        scaled: Tensor = (noise - (noise @ self.inputs.mT) @ gain) * self.scale
        return scaled

    def mahalanobis(self, difference: Tensor) -> Tensor:
        rows = self.as_matrix(difference).double() / self.scale
        seen = rows @ self.inputs.mT
        squares: Tensor = rows.square().sum((-2, -1)) + seen.square().sum((-2, -1))
        return squares.to(self.loc.dtype)

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        images = linear_map.bank(x, self._scaled(torch.eye(len(self.scale)).to(self.scale)).to(x))
        shared: Tensor = images.square().sum(linear_map.channel_dim, keepdim=True)
        return shared.repeat_interleave(len(self.loc), linear_map.channel_dim)


def already_drawn(distribution: Any, value: Tensor) -> Any:
    """Return a copy of a distribution whose only draw is the given value."""
    known = copy.copy(distribution)

    def drawn(sample_shape: Any = ()) -> Tensor:
        if sample_shape:
            raise NotImplementedError("There is only one draw, since later layers depend on it.")
        return value

    # Attributes of the object keep its class, which determines the KL.
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
