"""What the distribution of a weight is given the inputs that it meets at chosen points."""

import copy
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.distributions.matrix_normal import MatrixNormal
from pyro_structvi.linalg.precision import autocast_off

OF_DRAWS = (
    "A weight that is drawn given its inputs has no distribution by itself. Take `guide.draw()`, or for "
    "its distribution at the inputs `rows (rows, in)` its `given(rows)`."
)


class NormalGivenInputs(TorchDistribution):
    r"""A weight whose distribution depends on the inputs ``X (rows, in)`` that it meets.

    It is what a Bayesian linear regression on X would give, for outputs V that were never observed:

    .. math:: W_{i \cdot} \mid X \sim N(S X^\top \Lambda V_{\cdot i}, S), \qquad
        S^{-1} = \operatorname{diag}(s)^{-2} + X^\top \Lambda X,

    independent over rows i, with a precision for each row of X in the diagonal of :math:`\Lambda`. By
    itself it has no draws and no density: what X is, the layers before decide.

    Args:
        event_shape: The weight's shape, ``(out, *rest)``.
        target: The outputs V, ``(rows, out)``.
        log_precision: Logarithms of the precisions, ``(rows,)``.
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

    def given(self, rows: Tensor) -> MatrixNormal:
        """Return the distribution of the weight that meets these inputs ``(rows, in)``.

        Precisions are those of many observations, so the factors are computed in double.
        """
        with autocast_off(rows):
            scale = self.log_scale.double().exp()
            root = (0.5 * self.log_precision.double()).exp().unsqueeze(-1)
            weighted = rows.double() * scale * root
            identity = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
            precision = torch.addmm(identity, weighted.mT, weighted)
            # A factor from the last element on, whose inverse is that of the covariance from the first.
            factor, info = torch.linalg.cholesky_ex(precision.flip(-2, -1))
            factor = factor.masked_fill(info > 0, torch.nan)  # of inputs that are not finite
            inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
            column = inverse.flip(-2, -1).mT
            seen = weighted.mT @ (root * self.target.double())
            loc = (scale.unsqueeze(-1) * (column @ (column.mT @ seen))).mT
            column = scale.unsqueeze(-1) * column
        dtype = self.log_scale.dtype
        return _EqualRows(loc.to(dtype).reshape(self.event_shape), column.to(dtype))


class _EqualRows(MatrixNormal):
    """A matrix normal whose rows are independent, and have one covariance."""

    def __init__(self, loc: Tensor, column: Tensor) -> None:
        identity = torch.eye(len(loc), dtype=loc.dtype, device=loc.device)
        super().__init__(loc, identity, column, validate_args=False)

    def scale_noise(self, noise: Tensor) -> Tensor:
        return self.as_weight(self.as_matrix(noise) @ self.scale_tril_column.mT)


def already_drawn(distribution: Any, value: Tensor) -> Any:
    """Return a distribution whose one draw is made already: ``rsample`` returns the value."""
    known = copy.copy(distribution)

    def drawn(sample_shape: Any = ()) -> Tensor:
        return value.expand(*sample_shape, *value.shape) if sample_shape else value

    # Of this object, since its class decides what its divergence to a prior is.
    known.__dict__.update(rsample=drawn, sample=drawn, applies_in_factors=False)
    return known
