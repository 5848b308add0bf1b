"""A weight given its inducing weights."""

from torch import Tensor

from pyro_structvi._checks import checked
from pyro_structvi.distributions.inducing.augmented import AugmentedNormal, check_inducing
from pyro_structvi.distributions.inducing.prior import InducingPrior
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.linalg.kronecker import KroneckerLogDet, KroneckerQuadratic


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

    @checked
    def __init__(
        self,
        joint: InducingPrior,
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
        out, size = self.joint.matrix_shape
        prior = self.joint.column_scale.log().expand(*self.batch_shape, 1, size).sum((-2, -1))
        rows, columns = self.joint.rows.complement, self.joint.columns.complement
        log_det: Tensor = KroneckerLogDet.apply(rows.double(), columns.double())
        total: Tensor = 2 * out * (prior + size * self.conditional_scale.log())
        return total + log_det.to(total.dtype)

    def mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        v, seen = self._seen(difference)
        rows, columns = self.joint.rows.complement, self.joint.columns.complement
        quadratic: Tensor = KroneckerQuadratic.apply(seen, rows.double(), columns.double())
        total = v.square().sum((-2, -1)) + quadratic.to(v.dtype)
        return total / self.conditional_scale.square()
