"""A weight given its inducing weights."""

from typing import TYPE_CHECKING

from torch import Tensor

from pyro_structvi.distributions.inducing.augmented import AugmentedNormal, check_inducing
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.linalg.kronecker import KroneckerLogDet, KroneckerQuadratic

if TYPE_CHECKING:
    from pyro_structvi.distributions.inducing.joint import AugmentedMatrixNormal


class ConditionalNormal(AugmentedNormal):
    r"""A weight given its inducing weights, :math:`N(\mu_{W|U}, \lambda^2 \Sigma_{W|U})`.

    .. math:: \mu = \sigma B_r^\top \tilde U B_c, \qquad \Sigma = \sigma^2 (I - P_r \otimes P_c)

    In the eigenbases of :math:`P_r` and :math:`P_c` the covariance is diagonal, :math:`1 - p_i q_j`, so
    that density and entropy cost a sum of ``M_out M_in`` terms.

    Args:
        joint: The joint prior; :meth:`AugmentedMatrixNormal.condition` makes one of these.
        whitened: The whitened inducing weights, ``(*batch, M_out, M_in)``.
        conditional_scale: The :math:`\lambda`, ``(*batch,)``, positive.
        validate_args: Whether to check arguments and the values given to ``log_prob``; Pyro's own
            setting when None.

    Raises:
        ValueError: If ``whitened`` has another shape, or ``conditional_scale`` is not positive.

    Example:
        >>> import torch
        >>> from pyro_structvi.distributions import AugmentedMatrixNormal
        >>> one = torch.ones(1)
        >>> joint = AugmentedMatrixNormal(torch.ones(1, 2), torch.ones(1, 3), one, one, scale=0.5)
        >>> q = joint.condition(torch.zeros(1, 1))
        >>> q.variance[0, 0]  # 1/4 (1 - 1/3 1/4)
        tensor(0.2292)

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", Eq. 7 and 11-12.
    """

    def __init__(
        self,
        joint: "AugmentedMatrixNormal",
        whitened: Tensor,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        check_inducing("whitened", whitened, joint, validate_args)
        inducing = PointMixture(whitened.unsqueeze(-3), event_dim=2, validate_args=False)
        super().__init__(joint, inducing, conditional_scale, validate_args)

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        log_scale = self.conditional_scale.log() * self._size
        prior = log_scale + self._scales.log().expand(*self.batch_shape, 1, self._size).sum((
            -2,
            -1,
        ))
        complements = (side.complement.double() for side in (self.joint.rows, self.joint.columns))
        log_det: Tensor = KroneckerLogDet.apply(*complements)
        total: Tensor = 2 * self.event_shape[0] * prior + log_det.to(prior.dtype)
        return total

    def mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        v, seen = self._seen(difference)
        complements = (side.complement.double() for side in (self.joint.rows, self.joint.columns))
        quadratic: Tensor = KroneckerQuadratic.apply(seen, *complements)
        total = v.square().sum((-2, -1)) + quadratic.to(v.dtype)
        return total / self.conditional_scale.square()
