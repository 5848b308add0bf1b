"""Weights with inducing weights: their joint prior, and a weight given its inducing weights."""

from collections.abc import Sequence
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
    shape_text,
    validates,
)
from pyro_structvi.linalg.matrices import (
    autocast_off,
    grad_cached_property,
    identity_like,
    kronecker,
    kronecker_log_det,
    kronecker_quadratic,
    standard_normal,
)
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.structures.inducing.outputs import (
    InducingSide,
    MatheronBases,
    MatheronDraw,
    MatheronOutputs,
)
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.structures.points import PointMixture
from pyro_structvi.weights.arguments import as_expanded, as_size
from pyro_structvi.weights.torch_distributions import Container
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    GaussianWeight,
    Way,
    WeightDistribution,
)

# The cost of noise for one output, in multiplications. By time alone it is about 700, but drawn
# outputs have gradients of smaller variance; see docs/scripts/inducing_layers.py.
NOISE_COST = 400


class AugmentedMatrixNormal(Container):
    r"""The joint prior of a weight W and inducing weights U, a normal of Khatri-Rao structure.

    .. math:: \begin{pmatrix} \operatorname{vec} W \\ \operatorname{vec} U \end{pmatrix} \sim N\left(0,
        \begin{pmatrix} \sigma^2 I & \sigma Z_r^\top \otimes Z_c^\top \\
        \sigma Z_r \otimes Z_c & \Psi_r \otimes \Psi_c \end{pmatrix} \right), \qquad
        \Psi = Z Z^\top + D^2

    with ``vec`` row by row. The marginal of W has independent entries :math:`N(0, \sigma^2)` for any Z
    and D, which are therefore free parameters of a posterior. *Whitened* inducing weights
    :math:`\tilde U = L_r^{-1} U L_c^{-\top}` with :math:`L = \operatorname{chol}(\Psi)` are standard
    normal. With :math:`B = L^{-1} Z` and :math:`P = B^\top B`,

    .. math:: E[W \mid U] = \sigma B_r^\top \tilde U B_c, \qquad
        \operatorname{Cov}[W \mid U] = \sigma^2 (I - P_r \otimes P_c).

    Args:
        row_factor: :math:`Z_r`, ``(*batch, M_out, out)``.
        column_factor: :math:`Z_c`, ``(*batch, M_in, in)``.
        row_diagonal: The diagonal of :math:`D_r`, ``(*batch, M_out)``, positive.
        column_diagonal: The diagonal of :math:`D_c`, ``(*batch, M_in)``, positive.
        scale: The prior's standard deviation of W, a number or ``(*batch,)``.
        bias_scale: The prior's standard deviation of the last column, if it is a bias with another
            prior.
        event_shape: The weight's shape ``(out, *rest)`` if it is not a matrix; ``in = prod(rest)``.
        validate_args: Whether to check arguments; Pyro's setting when None.

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

    @checked
    def __init__(
        self,
        row_factor: Tensor,
        column_factor: Tensor,
        row_diagonal: Tensor,
        column_diagonal: Tensor,
        scale: Tensor | float,
        bias_scale: Tensor | float | None = None,
        *,
        event_shape: Sequence[int] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        for name, factor, side in (("row", row_factor, "out"), ("column", column_factor, "in")):
            if factor.dim() < 2:
                raise ValueError(
                    f"`{name}_factor` must have shape (*batch, M_{side}, {side}), but got "
                    f"{shape_text(factor.shape)}."
                )
        self.row_factor, self.column_factor = row_factor, column_factor
        self.row_diagonal, self.column_diagonal = row_diagonal, column_diagonal
        self.scale = self._tensor(scale)
        self.bias_scale = None if bias_scale is None else self._tensor(bias_scale)
        out, size = row_factor.shape[-1], column_factor.shape[-1]
        self.batch_shape = row_factor.shape[:-2]
        self.event_shape = torch.Size((out, size) if event_shape is None else event_shape)
        self.matrix_shape = torch.Size((out, size))
        self.inducing_shape = torch.Size([row_factor.shape[-2], column_factor.shape[-2]])
        self._with_grad = torch.is_grad_enabled() or None  # all factors have gradients, or none
        if validates(validate_args):
            self._check()

    def _tensor(self, value: Tensor | float) -> Tensor:
        return value if isinstance(value, Tensor) else self.row_factor.new_tensor(value)

    def _check(self) -> None:
        (out, size), (rows, columns) = self.matrix_shape, self.inducing_shape
        by = "row_factor and column_factor"
        for name, shape, meaning in (
            ("column_factor", (columns, size), "(*batch, M_in, in)"),
            ("row_diagonal", (rows,), "(*batch, M_out)"),
            ("column_diagonal", (columns,), "(*batch, M_in)"),
        ):
            check_shape(name, getattr(self, name), (*self.batch_shape, *shape), meaning, by=by)
        scales = [name for name in self.arguments if name.endswith("scale")]
        for name in scales:
            check_broadcastable(name, self.arguments[name], self.batch_shape, "(*batch,)")
        if self.event_shape[:1] != (out,) or self.event_shape[1:].numel() != size:
            raise ValueError(
                f"`event_shape` must be (out, *rest) with out = {out} and prod(rest) = {size}, but "
                f"got {shape_text(self.event_shape)} with these `row_factor` and `column_factor`."
            )
        for name, value in self.arguments.items():
            check_same_kind(name, value, "row_factor", self.row_factor)
        for name in ("row_factor", "column_factor"):
            check_finite(name, getattr(self, name))
        for name in ("row_diagonal", "column_diagonal", *scales):
            check_positive(name, getattr(self, name))

    @property
    def arguments(self) -> dict[str, Tensor]:
        names = ["row_factor", "column_factor", "row_diagonal", "column_diagonal", "scale"]
        names += [] if self.bias_scale is None else ["bias_scale"]
        return {name: getattr(self, name) for name in names}

    def expand(self, batch_shape: torch.Size) -> Self:
        batch_shape = as_expanded(batch_shape, self.batch_shape)
        expanded = {
            name: value.expand(batch_shape + value.shape[len(self.batch_shape) :])
            for name, value in self.arguments.items()
        }
        return type(self)(**expanded, event_shape=self.event_shape, validate_args=False)

    # ---- factors ---------------------------------------------------------------------------------

    @grad_cached_property
    def rows(self) -> InducingSide:
        return InducingSide.of(self.row_factor, self.row_diagonal)

    @grad_cached_property
    def columns(self) -> InducingSide:
        return InducingSide.of(self.column_factor, self.column_diagonal)

    @property
    def column_scale(self) -> Tensor:
        """The prior's standard deviation of W, ``(*batch, 1, 1)``, or ``(*batch, 1, in)`` by column."""
        scale = self.scale[..., None, None]
        if self.bias_scale is None:
            return scale
        columns = scale.expand(*scale.shape[:-1], self.matrix_shape[1] - 1)
        return torch.cat([columns, self.bias_scale[..., None, None]], -1)

    # ---- distributions ---------------------------------------------------------------------------

    def weight_prior(self) -> MeanFieldNormal:
        scale = self.column_scale.expand(*self.batch_shape, *self.matrix_shape)
        scale = scale.reshape(*self.batch_shape, *self.event_shape)
        loc = torch.zeros_like(scale)
        return MeanFieldNormal(loc, scale, len(self.event_shape), validate_args=False)

    def whiten(self, u: Tensor) -> Tensor:
        """Return whitened inducing weights for ``u (*sample, *batch, M_out, M_in)``."""
        half = torch.linalg.solve_triangular(self.rows.scale_tril, u.double(), upper=False)
        whole: Tensor = torch.linalg.solve_triangular(self.columns.scale_tril, half.mT, upper=False)
        return whole.mT.to(u.dtype)

    def draw_standard(self, sample_shape: torch.Size) -> tuple[Tensor, Tensor]:
        r"""Draw W for a prior scale of 1, as a matrix, jointly with the whitened U.

        :math:`U = B_r (E_1 B_c^\top + E_3 H_c^\top) + H_r E_2` for the weight :math:`E_1` takes no
        factor of :math:`Z Z^\top`; the paper's Eq. 12 takes two.
        """
        shape, (inducing_out, inducing_in) = (*sample_shape, *self.batch_shape), self.inducing_shape
        weight, for_columns, for_rows = (
            standard_normal((*shape, *size), self.row_factor)
            for size in (
                self.matrix_shape,
                (self.matrix_shape[0], inducing_in),
                (inducing_out, inducing_in),
            )
        )
        with autocast_off(weight):
            inner = weight @ self.columns.basis.mT + for_columns @ self.columns.remainder.mT
            return weight, self.rows.basis @ inner + self.rows.remainder @ for_rows

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
    def condition(self, u: Tensor, conditional_scale: Tensor | float = 1.0) -> "ConditionalNormal":
        r"""Return the distribution of W given U, with :math:`\lambda^2` times the covariance.

        Args:
            u: Inducing weights, ``(*batch, M_out, M_in)``, not whitened.
            conditional_scale: The :math:`\lambda` of the paper's Eq. 7, positive, a number or
                ``(*batch,)``.
        """
        check_inducing("u", u, self)
        return ConditionalNormal(self, self.whiten(u), conditional_scale)

    def rsample(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw W and U jointly, each ``(*sample, *batch, *event)``."""
        noise, whitened = self.draw_standard(as_size("sample_shape", sample_shape))
        weight = noise * self.column_scale
        inducing = self.inducing_prior().scale_noise(whitened)
        return weight.reshape(*weight.shape[:-2], *self.event_shape), inducing


def check_inducing(name: str, value: Tensor, joint: AugmentedMatrixNormal) -> None:
    """Raise a ``ValueError`` unless a tensor has the shape, dtype and device of inducing weights."""
    shape = (*joint.batch_shape, *joint.inducing_shape)
    check_shape(name, value, shape, "(*batch, M_out, M_in)")
    check_same_kind(name, value, "row_factor", joint.row_factor)
    check_finite(name, value)


class AugmentedNormal(GaussianWeight, FactoredWeight):
    r"""A weight that is normal given its inducing weights, with the density given these.

    .. math:: W = \sigma B_r^\top (\tilde U - \lambda \bar U) B_c + \lambda \sigma \bar W

    with whitened inducing weights :math:`\tilde U`, and :math:`\bar W, \bar U` from the joint prior
    (Matheron's rule). ``inducing`` is None if a guide draws them jointly with those of other layers.
    """

    arg_constraints: ClassVar = {"conditional_scale": constraints.positive}
    conditional_scale: Tensor

    def __init__(
        self,
        joint: AugmentedMatrixNormal,
        inducing: WeightDistribution | None,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        conditional_scale = joint._tensor(conditional_scale)
        self._set_shapes(joint.batch_shape, joint.event_shape, validate_args)
        if self._validate_args:
            name, shape = "conditional_scale", joint.batch_shape
            check_broadcastable(name, conditional_scale, shape, "(*batch,)")
            check_same_kind(name, conditional_scale, "row_factor", joint.row_factor)
            check_positive(name, conditional_scale)
        self.joint, self._inducing = joint, inducing
        self.conditional_scale = conditional_scale.expand(joint.batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        new = super().expand(batch_shape, _instance)
        new.joint = self.joint.expand(new.batch_shape)
        new._inducing = self.inducing.expand(new.batch_shape)
        return new

    @property
    def inducing(self) -> WeightDistribution:
        """The distribution of the whitened inducing weights, unless it is joint with other layers'."""
        if self._inducing is None:
            raise RuntimeError(
                "The inducing weights of several layers have one joint posterior, so this weight has "
                "no separate distribution. Draw all weights with `guide.draw()`."
            )
        return self._inducing

    @property
    def is_mixture(self) -> bool:
        return getattr(self._inducing, "is_mixture", False)

    @grad_cached_property
    def bases(self) -> MatheronBases:
        rows, columns, scale = self.joint.rows, self.joint.columns, self.joint.column_scale
        return MatheronBases(
            rows.basis, rows.remainder, columns.basis * scale, scale, self.conditional_scale
        )

    def factorize(self) -> None:
        _ = self.bases
        if isinstance(self._inducing, FactoredWeight):
            self._inducing.factorize()

    @property
    def _first_parameter(self) -> Tensor:
        return self.joint.row_factor

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        return self.as_weight(self.bases.project(self.inducing.mean))

    @property
    def mode(self) -> Tensor:
        if self.is_mixture:
            raise NotImplementedError("A mixture of normals has no mode in closed form.")
        return self.mean

    @property
    def variance(self) -> Tensor:
        hidden, squared = self.bases.columns.mT, self.joint.column_scale.square().mT
        return self.as_weight(self.bases.variance(self.inducing, hidden, squared).mT)

    @property
    def covariance_matrix(self) -> Tensor:
        gain = kronecker(self.bases.rows, self.bases.columns)
        covariance, squared = self.inducing.covariance_matrix, self.bases.squared_scale
        excess = covariance - squared * identity_like(covariance)
        return gain.mT @ excess @ gain + squared * self.joint.weight_prior().covariance_matrix

    def _seen(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices V for a prior scale of 1, and ``B_r V B_c'`` in double precision."""
        v = self.as_matrix(difference) / self.joint.column_scale
        with autocast_off(v):
            seen = self.joint.rows.basis @ v @ self.joint.columns.basis.mT
            return v, seen.double()

    @property
    def log_det_covariance(self) -> Tensor:
        out, size = self.joint.matrix_shape
        prior = self.joint.column_scale.log().expand(*self.batch_shape, 1, size).sum((-2, -1))
        rows, columns = self.joint.rows.complement, self.joint.columns.complement
        log_det = kronecker_log_det(rows.double(), columns.double())
        total: Tensor = 2 * out * (prior + size * self.conditional_scale.log())
        return total + log_det.to(total.dtype)

    def mahalanobis(self, difference: Tensor) -> Tensor:
        v, seen = self._seen(difference)
        rows, columns = self.joint.rows.complement, self.joint.columns.complement
        quadratic = kronecker_quadratic(seen, rows.double(), columns.double())
        total = v.square().sum((-2, -1)) + quadratic.to(v.dtype)
        return total / self.conditional_scale.square()

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self._draw(as_size("sample_shape", sample_shape)).weight()

    def draw_factored(self) -> MatheronDraw:
        return self._draw(torch.Size())

    def _draw(self, sample_shape: torch.Size) -> MatheronDraw:
        noise, whitened = self.joint.draw_standard(sample_shape)
        scale = self.conditional_scale[..., None, None]
        inducing = self.inducing.rsample(sample_shape) - scale * whitened
        return MatheronDraw(self.bases, inducing, noise, self.event_shape)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Rank outputs first, unless noise at every position costs more than the products it saves.

        A drawn weight is applied in factors if that costs less than the weight's gradient. A
        convolution with several groups takes a drawn weight.
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
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
    ) -> MatheronOutputs:
        """Return outputs whose positions share inducing weights and have independent noise."""
        linear_map = self.map_for_batch(linear_map)
        return MatheronOutputs(self.bases, self.inducing, linear_map, x, bias)


class ConditionalNormal(AugmentedNormal):
    r"""A weight given its inducing weights, :math:`N(\mu_{W|U}, \lambda^2 \Sigma_{W|U})`.

    .. math:: \mu = \sigma B_r^\top \tilde U B_c, \qquad \Sigma = \sigma^2 (I - P_r \otimes P_c)

    The covariance is diagonal in the eigenbases of :math:`P_r` and :math:`P_c`, so density and
    entropy are sums of ``M_out M_in`` terms.

    Args:
        joint: The joint prior; :meth:`AugmentedMatrixNormal.condition` makes one of these.
        whitened: The whitened inducing weights, ``(*batch, M_out, M_in)``.
        conditional_scale: The :math:`\lambda`, ``(*batch,)``, positive.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Example:
        >>> from pyro_structvi.distributions import AugmentedMatrixNormal
        >>> one = torch.ones(1)
        >>> joint = AugmentedMatrixNormal(torch.ones(1, 2), torch.ones(1, 3), one, one, scale=0.5)
        >>> q = joint.condition(torch.zeros(1, 1))
        >>> q.variance[0, 0]  # 1/4 (1 - 1/3 1/4)
        tensor(0.2292)

    References:
        Ritter et al. (2021), as for :class:`AugmentedMatrixNormal`, Eq. 7 and 11-12.
    """

    @checked
    def __init__(
        self,
        joint: AugmentedMatrixNormal,
        whitened: Tensor,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        if validates(validate_args):
            check_inducing("whitened", whitened, joint)
        inducing = PointMixture(whitened.unsqueeze(-3), event_dim=2, validate_args=False)
        super().__init__(joint, inducing, conditional_scale, validate_args)
