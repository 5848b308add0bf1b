"""Matheron's rule: a weight, or a layer's outputs, without the weight being formed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_structvi.distributions.outputs import OutputDistribution
from pyro_structvi.linalg.fused import add_scaled_noise
from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.maps import BiasColumnMap, DenseMap, LinearMap

if TYPE_CHECKING:
    from pyro_structvi.distributions.inducing.augmented import AugmentedNormal
    from pyro_structvi.distributions.inducing.joint import AugmentedMatrixNormal


@dataclass(frozen=True)
class MatheronDraw:
    """A draw of a weight as a low-rank part and noise that takes no gradient.

    Attributes:
        law: The law of the weight.
        inducing: The whitened inducing weights of the low-rank part, ``(*sample, M_out, M_in)``.
        noise: Standard normal, ``(*sample, out, in)``.
    """

    law: "AugmentedNormal"
    inducing: Tensor
    noise: Tensor

    def weight(self) -> Tensor:
        """Return the weight."""
        law = self.law
        coefficient = law.conditional_scale[..., None, None] * law._scales
        weight = add_scaled_noise(law._project(self.inducing), coefficient, self.noise)
        return law.as_weight(weight)

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


class AugmentedImage(OutputDistribution):
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
        weight: "AugmentedNormal",
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
        self._set_shapes(torch.Size(shape), linear_map.event_dim(self._hidden))

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
    def _dense(self) -> MultivariateNormal:
        if self._of._is_mixture:
            raise NotImplementedError(
                "Outputs of a mixture of normals have draws and moments only."
            )
        return super()._dense

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
        outputs = add_scaled_noise(outputs, self._scale * length, noise)
        if self._bias_variance is not None:
            spread = floored_sqrt(self._bias_variance)
            spread = spread.reshape(-1, *(1 for _ in range(-self._map.channel_dim - 1)))
            outputs = add_scaled_noise(outputs, spread, torch.randn_like(outputs))
        draws: Tensor = outputs.reshape(self._extended_shape(sample))
        return draws

    def _standard_noise(self, hidden: Tensor) -> Tensor:
        shape = list(hidden.shape)
        shape[self._map.channel_dim] = self._rows.shape[-1]
        return torch.randn(shape, dtype=hidden.dtype, device=hidden.device)

    def _apply_inducing(self, hidden: Tensor) -> Tensor:
        """Draw the inducing weights times ``hidden``, one draw for all positions of an example."""
        inducing, event_dim = self._of.inducing, len(self.event_shape)
        if event_dim == 1:
            drawn: Tensor = inducing.image_under(DenseMap(positions=False), hidden).rsample()
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
