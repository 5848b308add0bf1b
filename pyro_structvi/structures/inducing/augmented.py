"""Weights given their inducing weights, and the joint prior of both."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import (
    check_broadcastable,
    check_finite,
    check_positive,
    check_same_kind,
    check_shape,
    checked,
    validates,
)
from pyro_structvi.linalg.matrices import KroneckerLogDet, KroneckerQuadratic, identity_like
from pyro_structvi.linalg.precision import autocast_off, grad_cached_property
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.structures.ensemble import PointMixture
from pyro_structvi.structures.inducing.outputs import (
    MatheronBases,
    MatheronDraw,
    MatheronOutputs,
)
from pyro_structvi.structures.inducing.prior import InducingPrior, kronecker
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.weights.arguments import as_size
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    GaussianWeight,
    Way,
    WeightDistribution,
    bias_moments,
)

NOISE_COST = 400


class AugmentedNormal(GaussianWeight, FactoredWeight, abstract=True):
    r"""A weight that is normal given its inducing weights, which have any distribution.

    .. math:: W = \sigma B_r^\top (\tilde U - \lambda \bar U) B_c + \lambda \sigma \bar W

    with whitened inducing weights :math:`\tilde U`, and :math:`\bar W, \bar U` from the joint prior
    (Matheron's rule). A subclass defines the density.

    Args:
        joint: The joint prior.
        inducing: The distribution of the whitened inducing weights ``(M_out, M_in)``; None where a
            guide draws them together with those of other weights.
        conditional_scale: The :math:`\lambda`, ``(*batch,)``, positive.
        validate_args: Pyro's own setting when None.
    """

    arg_constraints: ClassVar = {"conditional_scale": constraints.positive}
    conditional_scale: Tensor

    def __init__(
        self,
        joint: InducingPrior,
        inducing: WeightDistribution | None,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(conditional_scale, (int, float)):
            conditional_scale = joint.row_factor.new_tensor(conditional_scale)
        self._set_shapes(joint.batch_shape, joint.event_shape, validate_args)
        if self._validate_args:
            name, shape = "conditional_scale", joint.batch_shape
            check_broadcastable(name, conditional_scale, shape, "(*batch,)")
            check_same_kind(name, conditional_scale, "row_factor", joint.row_factor)
            check_positive(name, conditional_scale)
        self.joint, self._inducing = joint, inducing
        self.conditional_scale = conditional_scale.expand(joint.batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return this distribution with a larger batch shape, sharing memory."""
        new = super().expand(batch_shape, _instance)
        new.joint = self.joint.expand(new.batch_shape)
        new._inducing = self.inducing.expand(new.batch_shape)
        return new

    @property
    def inducing(self) -> WeightDistribution:
        """The distribution of the whitened inducing weights.

        Raises:
            RuntimeError: If they are drawn together with those of other weights.
        """
        if self._inducing is None:
            raise RuntimeError(
                "The inducing weights of this weight have one posterior with those of others, so that "
                "it does not have a distribution by itself here. Draw all of them, with "
                "`guide.draw()`."
            )
        return self._inducing

    @property
    def is_mixture(self) -> bool:
        """Whether this is not normal, but a mixture of several normals."""
        return getattr(self.inducing, "is_mixture", False)

    @grad_cached_property
    def bases(self) -> MatheronBases:
        """What Matheron's rule needs of this weight."""
        rows, columns, scale = self.joint.rows, self.joint.columns, self.joint.column_scale
        return MatheronBases(
            rows.basis, rows.remainder, columns.basis * scale, scale, self.conditional_scale
        )

    def factorize(self) -> None:
        """Factor both sides of the joint prior, and those of nested inducing weights."""
        _ = self.bases
        if isinstance(self._inducing, FactoredWeight):
            self._inducing.factorize()

    @property
    def _first_parameter(self) -> Tensor:
        return self.joint.row_factor

    # ---- moments ---------------------------------------------------------------------------------

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """The mean, ``(*batch_shape, *event_shape)``."""
        return self.as_weight(self.bases.project(self.inducing.mean))

    @property
    def mode(self) -> Tensor:
        """The mode, which is the mean.

        Raises:
            NotImplementedError: For a mixture, which has none in closed form.
        """
        if self.is_mixture:
            raise NotImplementedError("A mixture of normals has no mode in closed form.")
        return self.mean

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        hidden, squared = self.bases.columns.mT, self.joint.column_scale.square().mT
        return self.as_weight(self.bases.variance(self.inducing, hidden, squared).mT)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)`` of the row-major weight; for small sizes."""
        gain = kronecker(self.bases.rows, self.bases.columns)
        covariance, squared = self.inducing.covariance_matrix, self.bases.squared_scale
        excess = covariance - squared * identity_like(covariance)
        return gain.mT @ excess @ gain + squared * self.joint.weight_prior().covariance_matrix

    def _seen(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices V for a prior scale of 1, and what inducing weights see of them, in double."""
        v = self.as_matrix(difference) / self.joint.column_scale
        with autocast_off(v):
            seen = self.joint.rows.basis @ v @ self.joint.columns.basis.mT
            return v, seen.double()

    # ---- draws -----------------------------------------------------------------------------------

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)`` by the extended Matheron rule."""
        return self._draw(as_size("sample_shape", sample_shape)).weight()

    def draw_factored(self) -> MatheronDraw:
        """Draw a weight that is not formed."""
        return self._draw(torch.Size())

    def _draw(self, sample_shape: torch.Size) -> MatheronDraw:
        noise, whitened = self.joint.draw_standard(sample_shape)
        scale = self.conditional_scale[..., None, None]
        inducing = self.inducing.rsample(sample_shape) - scale * whitened
        return MatheronDraw(self.bases, inducing, noise, self.event_shape)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Draw outputs, unless noise at every position costs clearly more than the products it saves.

        Where an example has several positions both are approximate in one way or another: outputs drop
        correlations between positions, a drawn weight ties the examples of a batch together. A drawn
        weight is applied in factors if their products, gradients too, are less than the gradient of the
        weight. A convolution with several groups gets a drawn weight.
        """
        if linear_map.groups > 1:
            return ("weight",)
        out, size = self.joint.matrix_shape
        inducing_out, inducing_in = self.joint.inducing_shape
        whole = out * size
        thin = size * inducing_in + inducing_out * (inducing_in + out)
        drawn: tuple[Way, ...] = ("factors", "weight") if 3 * thin < whole else ("weight",)
        of_outputs = thin + out * (inducing_out + NOISE_COST)
        if linear_map.has_positions(x) and of_outputs > whole:
            return (*drawn, "outputs")
        return ("outputs", *drawn)

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | WeightDistribution | None = None
    ) -> MatheronOutputs:
        """Return the distribution of ``linear_map(x, W) + bias``; no weight is formed.

        All positions of an example share its inducing weights; the noise given those is independent over
        positions. Convolutions with several groups are not served.
        """
        linear_map, moments = self.map_for_batch(linear_map), bias_moments(bias)
        return MatheronOutputs(self.bases, self.inducing, linear_map, x, *moments)


def check_inducing(
    name: str, value: Tensor, joint: InducingPrior, validate_args: bool | None
) -> None:
    """Raise a ``ValueError`` unless a tensor fits a joint prior's inducing weights, if that is asked."""
    if validates(validate_args):
        shape = (*joint.batch_shape, *joint.inducing_shape)
        check_shape(name, value, shape, "(*batch, M_out, M_in)")
        check_same_kind(name, value, "row_factor", joint.row_factor)
        check_finite(name, value)


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
