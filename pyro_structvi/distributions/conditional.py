"""A weight given its joint prior with inducing weights: draws, moments and outputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_structvi._autocast import autocast_off
from pyro_structvi._checks import (
    check_broadcastable,
    check_positive,
    check_same_kind,
    check_shape,
)
from pyro_structvi._fused import AddScaledNoise
from pyro_structvi._linear_algebra import KroneckerLogDet, KroneckerQuadratic
from pyro_structvi.distributions.full import DenseImage
from pyro_structvi.distributions.mean_field import bias_moments, floored_sqrt
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.distributions.weight_distribution import WeightDistribution
from pyro_structvi.linear_maps import BiasColumnMap, DenseMap, LinearMap

if TYPE_CHECKING:
    from pyro_structvi.distributions.augmented import AugmentedMatrixNormal

NOISE_COST = 700  # of one output, in multiplications; docs/scripts/inducing_layers.py measures it


class AugmentedNormal(WeightDistribution):
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
    has_factored_draws = True
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
        return self._weight(self._project(self.inducing.mean))

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
        return self._weight((spread + self._squared_lambda(2) * (1 - overlap)) * self._scales**2)

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

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)`` by the extended Matheron rule."""
        return self._draw(torch.Size(sample_shape)).weight()

    def rsample_in_factors(self) -> "MatheronDraw":
        """Draw a weight that is not formed."""
        return self._draw(torch.Size())

    def _draw(self, sample_shape: torch.Size) -> "MatheronDraw":
        noise, whitened = self.joint.draw_standard(sample_shape)
        scale = self.conditional_scale[..., None, None]
        return MatheronDraw(self, self.inducing.rsample(sample_shape) - scale * whitened, noise)

    def draws_in_factors(self, linear_map: LinearMap) -> bool:
        """Whether the factors' products, gradients too, are less than the gradient of the weight."""
        out, (inducing_out, inducing_in) = self.event_shape[0], self.joint.inducing_shape
        thin = self._size * inducing_in + inducing_out * (inducing_in + out)
        draws: bool = linear_map.groups == 1 and 3 * thin < out * self._size
        return draws

    def _perturbation(self, shape: torch.Size) -> Tensor:
        return self.rsample(shape[: len(shape) - len(self._extended_shape())]) - self.loc

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> "AugmentedImage | None":
        """Return the law of ``linear_map(x, W) + bias``; None for a convolution with several groups.

        No weight is formed: see :class:`AugmentedImage`.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            bias: Nothing, a tensor ``(out,)``, or the distribution of one with independent elements,
                independent of ``W`` too.

        Returns:
            The law of the outputs. All positions of an example share its inducing weights; the noise
            given those is independent over positions.
        """
        if linear_map.groups > 1:
            return None
        return AugmentedImage(self, self._map_for_batch(linear_map), x, *bias_moments(bias))

    def prefers_drawn_weight(self, linear_map: LinearMap, x: Tensor) -> bool:
        """Whether noise at every position costs more than the products that it saves.

        Where an example has several positions both are approximate in one way or another: outputs drop
        correlations between positions, a drawn weight ties the examples of a batch together.
        """
        if not linear_map.has_positions(x):
            return False
        out, (inducing_out, inducing_in) = self.event_shape[0], self.joint.inducing_shape
        thin = self._size * inducing_in + inducing_out * (inducing_in + 2 * out)
        prefers: bool = thin + NOISE_COST * out > out * self._size
        return prefers

    # ---- what these share ------------------------------------------------------------------------

    @property
    def _first_parameter(self) -> Tensor:
        return self.joint.row_factor

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

    def _squared_lambda(self, dims: int) -> Tensor:
        return self.conditional_scale.square()[(..., *(None for _ in range(dims)))]

    def _weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(*matrix.shape[:-2], *self.event_shape)

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
        new._validate_args, new.site_use = self._validate_args, self.site_use
        return new


@dataclass(frozen=True)
class MatheronDraw:
    """A draw of a weight as a low-rank part and noise that takes no gradient.

    Attributes:
        law: The law of the weight.
        inducing: The whitened inducing weights of the low-rank part, ``(*sample, M_out, M_in)``.
        noise: Standard normal, ``(*sample, out, in)``.
    """

    law: AugmentedNormal
    inducing: Tensor
    noise: Tensor

    def weight(self) -> Tensor:
        """Return the weight."""
        law = self.law
        coefficient = law.conditional_scale[..., None, None] * law._scales
        weight = AddScaledNoise.apply(law._project(self.inducing), coefficient, self.noise)
        return law._weight(weight)

    def apply(self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``linear_map(x, W) + bias``: two products of the weight's size in place of three."""
        law = self.law
        rows, columns = law._bases
        hidden = linear_map.bank(x, columns * law._scales)
        low_rank = linear_map.mix(linear_map.mix(hidden, self.inducing), rows.mT, bias)
        coefficient, noise = law.conditional_scale * law.joint.scale, self.noise
        if law.joint.bias_scale is not None:
            noise = noise * (law._scales / law.joint.scale)
        return torch.addcmul(low_rank, coefficient, linear_map(x, noise))


class AugmentedImage(DenseImage):
    r"""The law of the outputs of a weight with inducing weights; a draw never forms the weight.

    With :math:`h = B_c (\sigma x)`, an output is

    .. math:: y = B_r^\top (\tilde U h) + \lambda n, \qquad n \sim N(0, |\sigma x|^2 I - |h|^2 P_r),

    .. math:: n = a e - \left(a - \sqrt{a^2 - |h|^2}\right) B_r^\top (B_r e - H_r g), \qquad
        a = |\sigma x|,

    with standard normal e of size ``out`` and g of size ``M_out``: :math:`B_r e - H_r g` is standard
    normal again. For each example it costs ``in M_in + M_in M_out + 2 out M_out`` multiplications.
    """

    def __init__(
        self,
        weight: AugmentedNormal,
        linear_map: LinearMap,
        x: Tensor,
        bias_loc: Tensor | None,
        bias_variance: Tensor | None,
    ) -> None:
        joint = weight.joint
        self._of, self._map = weight, linear_map
        self._bias_loc, self._bias_variance = bias_loc, bias_variance
        basis = joint.columns.basis * weight._scales
        self._hidden, squared = linear_map.bank_and_squared_norm(x, basis)
        self._squared = _scaled(squared, joint, linear_map, x)
        shape = list(self._hidden.shape)
        shape[linear_map.channel_dim] = weight.event_shape[0]
        split = len(shape) - linear_map.event_dim(self._hidden)
        self._set_shapes(torch.Size(shape[:split]), torch.Size(shape[split:]), False)

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """The mean of each output, ``(*batch_shape, *event_shape)``."""
        inner = self._map.mix(self._hidden, self._of.inducing.mean)
        return self._map.mix(inner, self._rows.mT, self._bias_loc)

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``(*batch_shape, *event_shape)``."""
        at_positions = self._covariance_at_positions().diagonal(dim1=-2, dim2=-1)
        if self._map.channel_dim == -1:
            return at_positions.reshape(self._extended_shape())
        return at_positions.mT.reshape(self._extended_shape())

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)`` for E outputs; for small sizes."""
        if len(self.event_shape) == 1:
            return self._covariance_at_positions()
        hidden = self._to_positions(self._hidden)
        spread = torch.einsum(
            "ai,...pb,abcd,ck,...qd->...piqk",
            self._rows, hidden, self._of._covariance, self._rows, hidden,
        )  # fmt: skip
        apart = self._noise_at_positions()
        positions = torch.eye(hidden.shape[-2], dtype=hidden.dtype, device=hidden.device)
        covariance: Tensor = spread + torch.einsum("...pik,pq->...piqk", apart, positions)
        if self._map.channel_dim != -1:
            covariance = covariance.transpose(-4, -3).transpose(-2, -1)
        return covariance.flatten(-4, -3).flatten(-2)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw outputs ``(*sample_shape, *batch_shape, *event_shape)``."""
        sample = torch.Size(sample_shape)
        hidden, squared = self._repeat(self._hidden, sample), self._repeat(self._squared, sample)
        mix, joint = self._map.mix, self._of.joint
        overlap = hidden.square().sum(self._map.channel_dim, keepdim=True)
        least = 8 * torch.finfo(squared.dtype).eps * squared  # rounding leaves no less
        length = floored_sqrt(squared)
        known = length - floored_sqrt(torch.maximum(squared - overlap, least))
        noise = self._standard_noise(hidden)
        inner = self._apply_inducing(hidden)
        seen = mix(noise, self._rows) - mix(torch.randn_like(inner), joint.rows.remainder)
        inner = torch.addcmul(inner, self._scale * known, seen, value=-1)
        outputs = mix(inner, self._rows.mT, self._bias_loc)
        outputs = AddScaledNoise.apply(outputs, self._scale * length, noise)
        if self._bias_variance is not None:
            spread = floored_sqrt(self._bias_variance)
            spread = spread.reshape(-1, *(1 for _ in range(-self._map.channel_dim - 1)))
            outputs = AddScaledNoise.apply(outputs, spread, torch.randn_like(outputs))
        draws: Tensor = outputs.reshape(self._extended_shape(sample))
        return draws

    def _perturbation(self, shape: torch.Size) -> Tensor:
        return self.rsample(shape[: len(shape) - len(self._extended_shape())]) - self.loc

    def _standard_noise(self, hidden: Tensor) -> Tensor:
        shape = list(hidden.shape)
        shape[self._map.channel_dim] = self._rows.shape[-1]
        return torch.randn(shape, dtype=hidden.dtype, device=hidden.device)

    def _apply_inducing(self, hidden: Tensor) -> Tensor:
        """Draw the inducing weights times ``hidden``, one draw for all positions of an example."""
        inducing, event_dim = self._of.inducing, len(self.event_shape)
        if event_dim == 1:
            image = inducing.image_under(DenseMap(positions=False), hidden)
            assert image is not None, (
                "Every law of inducing weights has an image under a dense map."
            )
            drawn: Tensor = image.rsample()
            return drawn
        draws = inducing.rsample(hidden.shape[: hidden.dim() - event_dim])
        channel = self._map.channel_dim
        if channel == -1:
            return (hidden.flatten(-event_dim, -2) @ draws.mT).reshape(*hidden.shape[:-1], -1)
        columns = draws @ hidden.flatten(channel + 1)
        images: Tensor = columns.unflatten(-1, hidden.shape[channel + 1 :])
        return images

    def _repeat(self, tensor: Tensor, sample: torch.Size) -> Tensor:
        """Repeat for each draw; where examples have positions, draws join the batch."""
        if not sample:
            return tensor
        repeated = tensor.expand(*sample, *tensor.shape)
        event_dim = len(self.event_shape)
        return repeated if event_dim == 1 else repeated.reshape(-1, *tensor.shape[-event_dim:])

    # ---- moments at positions --------------------------------------------------------------------

    def _covariance_at_positions(self) -> Tensor:
        """Return the covariance of the channels, ``(*batch_shape, positions, out, out)``."""
        hidden = self._to_positions(self._hidden)
        inner = torch.einsum("...b,...abcd,...d->...ac", hidden, self._of._covariance, hidden)
        return self._rows.mT @ inner @ self._rows + self._noise_at_positions()

    def _noise_at_positions(self) -> Tensor:
        """Return the part of that covariance which positions do not share."""
        squared, hidden = self._to_positions(self._squared), self._to_positions(self._hidden)
        overlap = hidden.square().sum(-1, keepdim=True)
        size = self._rows.shape[-1]
        identity = torch.eye(size, dtype=hidden.dtype, device=hidden.device)
        noise = squared.unsqueeze(-1) * identity - overlap.unsqueeze(-1) * (
            self._rows.mT @ self._rows
        )
        noise = self._scale.unsqueeze(-1).square() * noise
        if self._bias_variance is None:
            return noise
        return noise + torch.diag_embed(self._bias_variance)

    def _to_positions(self, tensor: Tensor) -> Tensor:
        """View ``(*batch, *event)`` as ``(*batch, positions, channels)``; vectors stay."""
        if len(self.event_shape) == 1:
            return tensor
        if self._map.channel_dim == -1:
            return tensor.flatten(-len(self.event_shape), -2)
        return tensor.flatten(self._map.channel_dim + 1).mT

    @property
    def _rows(self) -> Tensor:
        return self._of.joint.rows.basis

    @property
    def _scale(self) -> Tensor:
        """The scale of the conditional noise, broadcastable to the channels."""
        return self._of.conditional_scale.unsqueeze(-1)


def _scaled(
    squared: Tensor, joint: "AugmentedMatrixNormal", linear_map: LinearMap, x: Tensor
) -> Tensor:
    """Return the squared length of an input times the prior's scale, from its own squared length."""
    prior = joint.scale.square().unsqueeze(-1)
    if joint.bias_scale is None:
        return squared * prior
    if isinstance(linear_map, BiasColumnMap):
        return (squared - 1) * prior + joint.bias_scale.square()
    return linear_map.bank(x.square(), joint.column_scale.square().unsqueeze(-2))


def check_inducing(
    name: str, value: Tensor, joint: "AugmentedMatrixNormal", validate_args: bool | None
) -> None:
    """Raise a ``ValueError`` unless a tensor fits a joint prior's inducing weights, if that is asked."""
    if Distribution._validate_args if validate_args is None else validate_args:
        shape = (*joint.batch_shape, *joint.inducing_shape)
        check_shape(name, value, shape, "(*batch, M_out, M_in)")
        check_same_kind(name, value, "row_factor", joint.row_factor)


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

    def _mahalanobis(self, difference: Tensor) -> Tensor:
        batch = difference.shape[: difference.dim() - len(self.event_shape)]
        v = difference.reshape(*batch, self.event_shape[0], -1) / self._scales
        rows, columns = self._bases
        seen = (rows @ v @ columns.mT).double()
        complements = (side.complement.double() for side in (self.joint.rows, self.joint.columns))
        quadratic: Tensor = KroneckerQuadratic.apply(seen, *complements)
        total = v.square().sum((-2, -1)) + quadratic.to(v.dtype)
        return total / self.conditional_scale.square()
