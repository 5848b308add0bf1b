"""A weight given its joint prior with inducing weights, for any distribution of these."""

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
    validates,
)
from pyro_structvi.distributions.arguments import as_size
from pyro_structvi.distributions.gaussian_weight import GaussianWeight
from pyro_structvi.distributions.inducing.matheron import (
    MatheronBases,
    MatheronDraw,
    MatheronOutputs,
)
from pyro_structvi.distributions.inducing.prior import InducingPrior, kronecker
from pyro_structvi.distributions.outputs import bias_moments
from pyro_structvi.distributions.weight_distribution import Way, WeightDistribution
from pyro_structvi.linalg.formed_once import formed_once
from pyro_structvi.linalg.precision import autocast_off
from pyro_structvi.linalg.shapes import identity_like
from pyro_structvi.maps import LinearMap

# Of one output, in multiplications. By time alone it is about 700, but gradients are the less noisy
# where outputs are drawn; docs/scripts/inducing_layers.py measures both.
NOISE_COST = 400


class AugmentedNormal(GaussianWeight, abstract=True):
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
    takes_bias_column = True
    applies_in_factors = True
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

    @formed_once
    def bases(self) -> MatheronBases:
        """What Matheron's rule needs of this weight."""
        rows, columns, scale = self.joint.rows, self.joint.columns, self.joint.column_scale
        return MatheronBases(
            rows.basis, rows.remainder, columns.basis * scale, scale, self.conditional_scale
        )

    def factorize(self) -> None:
        """Factor both sides of the joint prior, and those of nested inducing weights."""
        _ = self.bases
        if self._inducing is not None:
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
            return drawn
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
