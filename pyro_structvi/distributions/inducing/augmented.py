"""A weight given its joint prior with inducing weights, for any law of these."""

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_structvi._checks import (
    check_broadcastable,
    check_positive,
    check_same_kind,
    check_shape,
)
from pyro_structvi.distributions.inducing.matheron import AugmentedImage, MatheronDraw
from pyro_structvi.distributions.outputs import bias_moments
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.distributions.weight_distribution import GaussianWeight, Way, WeightDistribution
from pyro_structvi.linalg.precision import autocast_off
from pyro_structvi.maps import LinearMap

if TYPE_CHECKING:
    from pyro_structvi.distributions.inducing.joint import AugmentedMatrixNormal

# Of one output, in multiplications. By time alone it is about 700, but gradients are the less noisy
# where outputs are drawn; docs/scripts/inducing_layers.py measures both.
NOISE_COST = 400


class AugmentedNormal(GaussianWeight, abstract=True):
    r"""A weight whose inducing weights have some law, and which given them is conditionally normal.

    .. math:: W = \sigma B_r^\top (\tilde U - \lambda \bar U) B_c + \lambda \sigma \bar W

    with :math:`\tilde U` from the law of the whitened inducing weights and :math:`\bar W, \bar U` from
    the joint prior (Matheron's rule). What the laws of W given U, and of W alone, share.

    Args:
        joint: The joint prior.
        inducing: The law of the whitened inducing weights ``(M_out, M_in)``; None where a guide draws
            them together with those of other weights.
        conditional_scale: The :math:`\lambda`, ``(*batch,)``, positive.
        validate_args: Pyro's own setting when None.
    """

    arg_constraints: ClassVar = {"conditional_scale": constraints.positive}
    _parameters = ("conditional_scale",)
    takes_bias_column = True
    conditional_scale: Tensor

    def __init__(
        self,
        joint: "AugmentedMatrixNormal",
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

    @property
    def inducing(self) -> WeightDistribution:
        """The law of the whitened inducing weights.

        Raises:
            RuntimeError: If they are drawn together with those of other weights.
        """
        if self._inducing is None:
            raise RuntimeError(
                "The inducing weights of this weight have one posterior with those of others, so that "
                "it has no law by itself here. Draw all of them, with `guide.draw()`."
            )
        return self._inducing

    # ---- moments ---------------------------------------------------------------------------------

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """The mean, ``(*batch_shape, *event_shape)``."""
        return self.as_weight(self._project(self.inducing.mean))

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        rows, columns = self._bases
        if self.inducing.has_independent_elements:
            spread = rows.square().mT @ self.inducing.variance @ columns.square()
        else:
            spread = torch.einsum(
                "...ai,...bj,...abcd,...ci,...dj->...ij",
                rows,
                columns,
                self._covariance,
                rows,
                columns,
            )
        overlap = rows.square().sum(-2).unsqueeze(-1) * columns.square().sum(-2).unsqueeze(-2)
        return self.as_weight((spread + self._squared_lambda(2) * (1 - overlap)) * self._scales**2)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)`` of the row-major weight; for small sizes."""
        rows, columns = self._bases
        spread = torch.einsum(
            "...ai,...bj,...abcd,...ck,...dl->...ijkl",
            rows,
            columns,
            self._covariance,
            rows,
            columns,
        )
        projections = torch.einsum("...ik,...jl->...ijkl", rows.mT @ rows, columns.mT @ columns)
        size = self.event_shape.numel()
        identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
        flat = (*self.batch_shape, size, size)
        noise = self._squared_lambda(2) * (identity - projections.reshape(flat))
        scale = self._scales.expand(*self.batch_shape, *projections.shape[-4:-2]).flatten(-2)
        covariance: Tensor = spread.reshape(flat) + noise
        return scale.unsqueeze(-1) * covariance * scale.unsqueeze(-2)

    # ---- draws -----------------------------------------------------------------------------------

    def factorize(self) -> None:
        """Factor both sides of the joint prior, and those of nested inducing weights."""
        _ = self.joint.rows, self.joint.columns
        if self._inducing is not None:
            self._inducing.factorize()

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)`` by the extended Matheron rule."""
        return self._draw(torch.Size(sample_shape)).weight()

    def draw_factored(self) -> "MatheronDraw":
        """Draw a weight that is not formed."""
        return self._draw(torch.Size())

    def _draw(self, sample_shape: torch.Size) -> "MatheronDraw":
        noise, whitened = self.joint.draw_standard(sample_shape)
        scale = self.conditional_scale[..., None, None]
        return MatheronDraw(self, self.inducing.rsample(sample_shape) - scale * whitened, noise)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Draw outputs, unless noise at every position costs clearly more than the products it saves.

        Where an example has several positions both are approximate in one way or another: outputs drop
        correlations between positions, a drawn weight ties the examples of a batch together. A drawn
        weight is applied in factors if their products, gradients too, are less than the gradient of the
        weight. A convolution with several groups gets a drawn weight.
        """
        if linear_map.groups > 1:
            return ("weight",)
        out, (inducing_out, inducing_in) = self.event_shape[0], self.joint.inducing_shape
        whole = out * self._size
        thin = self._size * inducing_in + inducing_out * (inducing_in + out)
        drawn: tuple[Way, ...] = ("factors", "weight") if 3 * thin < whole else ("weight",)
        of_outputs = thin + out * (inducing_out + NOISE_COST)
        if linear_map.has_positions(x) and of_outputs > whole:
            return drawn
        return ("outputs", *drawn)

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> "AugmentedImage":
        """Return the distribution of ``linear_map(x, W) + bias``; no weight is formed.

        Args:
            linear_map: A dense map, or a convolution without groups.
            x: Its input.
            bias: None, a tensor ``(out,)``, or the distribution of one with independent elements,
                independent of ``W`` too.

        Returns:
            A distribution over the outputs. All positions of an example share its inducing weights; the
            noise given those is independent over positions.
        """
        return AugmentedImage(self, self.map_for_batch(linear_map), x, *bias_moments(bias))

    # ---- what these share ------------------------------------------------------------------------

    @property
    def _first_parameter(self) -> Tensor:
        return self.joint.row_factor

    @property
    def _is_mixture(self) -> bool:
        """Whether this is no normal, but a mixture of several."""
        inducing = self.inducing
        if isinstance(inducing, PointMixture):
            return bool(inducing.members.shape[-3] > 1)
        return isinstance(inducing, AugmentedNormal) and inducing._is_mixture

    @property
    def _bases(self) -> tuple[Tensor, Tensor]:
        return self.joint.rows.basis, self.joint.columns.basis

    @property
    def _scales(self) -> Tensor:
        """The prior's standard deviation of each column, ``(*batch, 1, in)`` or ``(*batch, 1, 1)``."""
        return self.joint.column_scale.unsqueeze(-2)

    @property
    def _covariance(self) -> Tensor:
        """The covariance of the whitened inducing weights, ``(*batch, M_out, M_in, M_out, M_in)``."""
        shape = self.joint.inducing_shape
        covariance = self.inducing.covariance_matrix.unflatten(-1, shape)
        unflattened: Tensor = covariance.unflatten(-3, shape)
        return unflattened

    @property
    def _size(self) -> int:
        """The inputs of the weight seen as a matrix."""
        size: int = self.event_shape[1:].numel()
        return size

    def _project(self, inducing: Tensor) -> Tensor:
        """Return the conditional mean, as a matrix, for whitened inducing weights."""
        rows, columns = self._bases
        with autocast_off(inducing):
            projected: Tensor = rows.mT @ inducing @ (columns * self._scales)
        return projected

    def _seen(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices V for a prior scale of 1, and what inducing weights see of them, in double."""
        v = self.as_matrix(difference) / self._scales
        rows, columns = self._bases
        with autocast_off(v):
            return v, (rows @ v @ columns.mT).double()

    def _squared_lambda(self, dims: int) -> Tensor:
        return self.conditional_scale.square()[(..., *(None for _ in range(dims)))]

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return this distribution with a larger batch shape, sharing memory."""
        batch_shape = torch.Size(batch_shape)
        new: Self = self._get_checked_instance(type(self), _instance)
        AugmentedNormal.__init__(
            new,
            self.joint.expand(batch_shape),
            self.inducing.expand(batch_shape),
            self.conditional_scale.expand(batch_shape),
            validate_args=False,
        )
        new._validate_args = self._validate_args
        return new


def check_inducing(
    name: str, value: Tensor, joint: "AugmentedMatrixNormal", validate_args: bool | None
) -> None:
    """Raise a ``ValueError`` unless a tensor fits a joint prior's inducing weights, if that is asked."""
    if Distribution._validate_args if validate_args is None else validate_args:
        shape = (*joint.batch_shape, *joint.inducing_shape)
        check_shape(name, value, shape, "(*batch, M_out, M_in)")
        check_same_kind(name, value, "row_factor", joint.row_factor)
