"""The joint prior of a weight and its inducing weights, and what it says of one given the other."""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._checks import check_finite, check_same_kind, check_shape, checked
from pyro_structvi.distributions.arguments import as_size
from pyro_structvi.distributions.inducing.conditional import ConditionalNormal
from pyro_structvi.distributions.inducing.prior import InducingPrior, kronecker
from pyro_structvi.distributions.matrix_normal import MatrixNormal


class AugmentedMatrixNormal(InducingPrior):
    r"""The joint prior of a weight W and inducing weights U, a normal of Khatri-Rao structure.

    .. math:: \begin{pmatrix} \operatorname{vec} W \\ \operatorname{vec} U \end{pmatrix} \sim N\left(0,
        \begin{pmatrix} \sigma^2 I & \sigma Z_r^\top \otimes Z_c^\top \\
        \sigma Z_r \otimes Z_c & \Psi_r \otimes \Psi_c \end{pmatrix} \right), \qquad
        \Psi = Z Z^\top + D^2

    with ``vec`` row by row. Whatever Z and D are, W alone has independent entries
    :math:`N(0, \sigma^2)`, so they are free parameters of a posterior. *Whitened* inducing weights are
    :math:`\tilde U = L_r^{-1} U L_c^{-\top}` with :math:`L = \operatorname{chol}(\Psi)`, standard
    normal. Then, with :math:`B = L^{-1} Z` and :math:`P = B^\top B`,

    .. math:: E[W \mid U] = \sigma B_r^\top \tilde U B_c, \qquad
        \operatorname{Cov}[W \mid U] = \sigma^2 (I - P_r \otimes P_c).

    The factors are computed at their first use, once for the life of the object.

    Args:
        row_factor: :math:`Z_r`, ``(*batch, M_out, out)``.
        column_factor: :math:`Z_c`, ``(*batch, M_in, in)``.
        row_diagonal: The diagonal of :math:`D_r`, ``(*batch, M_out)``, positive.
        column_diagonal: The diagonal of :math:`D_c`, ``(*batch, M_in)``, positive.
        scale: The prior's standard deviation of W, a number or ``(*batch,)``.
        bias_scale: The prior's standard deviation of the last column, if that is a bias with another
            prior.
        event_shape: The weight's own shape ``(out, *rest)`` if it is not a matrix; ``in = prod(rest)``.
        validate_args: Whether to check the arguments; Pyro's own setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a diagonal or the scale is not positive.

    Example:
        >>> row_factor, column_factor = torch.ones(1, 2), torch.ones(1, 3)
        >>> joint = AugmentedMatrixNormal(row_factor, column_factor, torch.ones(1), torch.ones(1), 0.5)
        >>> joint.covariance_matrix.shape
        torch.Size([7, 7])
        >>> joint.condition(torch.tensor([[2.0]])).mean
        tensor([[0.0833, 0.0833, 0.0833],
                [0.0833, 0.0833, 0.0833]])

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", Eq. 5-6.
    """

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance of ``vec(W)`` followed by ``vec(U)``; for small sizes."""
        prior = self.weight_prior().covariance_matrix
        cross = kronecker(self.row_factor, self.column_factor * self.column_scale)
        inducing = self.inducing_prior().covariance_matrix
        above = torch.cat([prior, cross.mT], -1)
        return torch.cat([above, torch.cat([cross, inducing], -1)], -2)

    def inducing_prior(self) -> MatrixNormal:
        r"""Return the distribution of U, the matrix normal of :math:`\Psi_r` and :math:`\Psi_c`."""
        dtype = self.row_factor.dtype
        rows, columns = self.rows.scale_tril.to(dtype), self.columns.scale_tril.to(dtype)
        loc = rows.new_zeros(*self.batch_shape, *self.inducing_shape)
        return MatrixNormal(loc, rows, columns, validate_args=False)

    @checked
    def condition(self, u: Tensor, conditional_scale: Tensor | float = 1.0) -> ConditionalNormal:
        r"""Return the distribution of W given U, its standard deviations multiplied by a number.

        Args:
            u: Inducing weights, ``(*batch, M_out, M_in)``, not whitened.
            conditional_scale: The :math:`\lambda` of the paper's Eq. 7, positive, a number or
                ``(*batch,)``.

        Returns:
            A normal with the conditional mean and :math:`\lambda^2` times the conditional covariance.

        Raises:
            ValueError: If ``u`` has another shape, or ``conditional_scale`` is not positive.
        """
        shape = (*self.batch_shape, *self.inducing_shape)
        check_shape("u", u, shape, "(*batch, M_out, M_in)")
        check_same_kind("u", u, "row_factor", self.row_factor)
        check_finite("u", u)
        return ConditionalNormal(self, self.whiten(u), conditional_scale)

    def rsample(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw W and U together, with shapes ``(*sample, *batch, *event)`` of each."""
        noise, whitened = self.draw_standard(as_size("sample_shape", sample_shape))
        weight = noise * self.column_scale
        inducing = self.inducing_prior().scale_noise(whitened)
        return weight.reshape(*weight.shape[:-2], *self.event_shape), inducing
