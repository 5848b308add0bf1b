"""Factors of the prior, and Matheron's rule: a weight, or a layer's outputs without the weight."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_structvi.linalg.factorizations import stable_cholesky
from pyro_structvi.linalg.matrices import (
    autocast_off,
    floored_sqrt,
    grad_cached_property,
    identity_like,
    standard_normal,
)
from pyro_structvi.maps.linear_map import DenseMap, LinearMap
from pyro_structvi.weights.outputs import GaussianOutputs
from pyro_structvi.weights.weight_distribution import IndependentWeight, WeightDistribution


class OrthonormalRows(torch.autograd.Function):
    """``L^-1 [Z, D]`` for ``L L' = Z Z' + D^2``: the LQ decomposition of ``[Z, D]``, by Cholesky.

    The factorization is in double precision and adds the smallest jitter that works to ``D^2``. The
    gradient is in the arguments' precision.
    """

    @staticmethod
    def forward(factor: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``L^-1 Z``, ``L^-1 D`` and the jitter for ``Z (*b, M, size)`` and ``D (*b, M)``."""
        double, square = factor.double(), diagonal.double().square()
        tril, jitter = stable_cholesky(double @ double.mT + torch.diag_embed(square))
        identity = identity_like(tril).expand_as(tril)
        inverse = torch.linalg.solve_triangular(tril, identity, upper=False).contiguous()
        remainder = inverse * (square + jitter.unsqueeze(-1)).sqrt().unsqueeze(-2)
        return (inverse @ double).to(factor.dtype), remainder.to(factor.dtype), jitter

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        (_, diagonal), (basis, remainder, jitter) = inputs, output
        ctx.save_for_backward(basis, remainder, diagonal, jitter)
        ctx.mark_non_differentiable(jitter)
        ctx.set_materialize_grads(False)  # the remainder of columns is rarely used

    @staticmethod
    def backward(
        ctx: Any, of_basis: Tensor | None, of_remainder: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        basis, remainder, diagonal, jitter = ctx.saved_tensors
        given = ((of_basis, basis), (of_remainder, remainder))
        products = [gradient @ rows.mT for gradient, rows in given if gradient is not None]
        if not products:
            return None, None
        jittered = (diagonal.double().square() + jitter.unsqueeze(-1)).sqrt().to(diagonal.dtype)
        inverse, share = remainder / jittered.unsqueeze(-2), diagonal / jittered
        product = sum(products[1:], products[0])
        symmetric = product.tril() + product.tril(-1).mT
        left, right = (
            (0 if gradient is None else gradient) - symmetric @ rows for gradient, rows in given
        )
        return inverse.mT @ left, (inverse * right).sum(-2) * share

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], factor: Tensor, diagonal: Tensor
    ) -> tuple[Any, tuple[int, int, int]]:
        values = zip((factor, diagonal), in_dims, strict=True)
        batches = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in values
        )
        return OrthonormalRows.apply(*batches), (0, 0, 0)


@dataclass(frozen=True)
class InducingSide:
    r"""The factored rows or columns of a joint prior, with :math:`\Psi = Z Z^\top + D^2 = L L^\top`."""

    factor: Tensor  # Z (*batch, M, size)
    diagonal: Tensor  # of D, (*batch, M)
    basis: Tensor  # B = L^-1 Z (*batch, M, size)
    remainder: Tensor  # H = L^-1 D (*batch, M, M), so that B B' + H H' = I
    jitter: Tensor  # added to the diagonal of Psi, (*batch,)
    _with_grad: bool | None = field(
        default_factory=lambda: torch.is_grad_enabled() or None, init=False, repr=False
    )

    @classmethod
    def of(cls, factor: Tensor, diagonal: Tensor) -> Self:
        """Factor ``Z (*batch, M, size)`` and the diagonal ``D (*batch, M)``."""
        with autocast_off(factor):
            return cls(factor, diagonal, *OrthonormalRows.apply(factor, diagonal))

    @grad_cached_property
    def scale_tril(self) -> Tensor:
        """The factor :math:`L`, ``(*batch, M, M)``, in double precision."""
        factor, square = self.factor.double(), self.diagonal.double().square()
        psi = factor @ factor.mT + torch.diag_embed(square + self.jitter.unsqueeze(-1))
        return torch.linalg.cholesky_ex(psi).L

    @grad_cached_property
    def complement(self) -> Tensor:
        """The matrix ``I - B B' = H H'``, ``(*batch, M, M)``."""
        with autocast_off(self.remainder):
            return self.remainder @ self.remainder.mT


@dataclass(frozen=True)
class MatheronBases:
    r"""The factors of Matheron's rule, :math:`W = B_r^\top \tilde U C + \lambda \sigma N`."""

    rows: Tensor  # B_r (*batch, M_out, out)
    remainder: Tensor  # H_r (*batch, M_out, M_out)
    columns: Tensor  # C = sigma B_c (*batch, M_in, in)
    prior_scale: Tensor  # sigma (*batch, 1, 1), or (*batch, 1, in) by column
    conditional_scale: Tensor  # lambda (*batch,)

    @property
    def squared_scale(self) -> Tensor:
        """The squared scale of the conditional noise, ``(*batch, 1, 1)``."""
        return self.conditional_scale.square()[..., None, None]

    @property
    def has_one_scale(self) -> bool:
        return self.prior_scale.shape[-1] == 1

    def project(self, inducing: Tensor) -> Tensor:
        """Return the conditional mean, as a matrix, for whitened inducing weights."""
        with autocast_off(inducing):
            return self.rows.mT @ inducing @ self.columns

    def variance(self, inducing: WeightDistribution, hidden: Tensor, squared: Tensor) -> Tensor:
        r"""Return the variances ``(..., positions, out)``, for :math:`C x` and :math:`|\sigma x|^2`."""
        squares = self.rows.square()
        if isinstance(inducing, IndependentWeight):
            spread = hidden.square() @ inducing.variance.mT @ squares
        else:
            seen = inducing.image_under(DenseMap(False), hidden.movedim(-2, 0)).covariance_matrix
            spread = (self.rows * (seen @ self.rows)).sum(-2).movedim(0, -2)
        overlap = hidden.square().sum(-1, keepdim=True) * squares.sum(-2, keepdim=True)
        return spread + self.squared_scale * (squared - overlap)

    def squared_norm(self, linear_map: LinearMap, x: Tensor, squared: Tensor) -> Tensor:
        r"""Return :math:`|\sigma x|^2` from the squared norm of x."""
        prior = self.prior_scale.square()
        if self.has_one_scale:
            return squared * prior[..., 0]
        if linear_map.has_bias_column:
            return (squared - 1) * prior[..., 0, :1] + prior[..., 0, -1:]
        return linear_map.bank(x.square(), prior)


@dataclass(frozen=True)
class MatheronDraw:
    """A draw of a weight as a low-rank part plus noise without a gradient."""

    bases: MatheronBases
    inducing: Tensor  # whitened, (*sample, M_out, M_in)
    noise: Tensor  # (*sample, out, in)
    event_shape: torch.Size

    def weight(self) -> Tensor:
        coefficient = self.bases.conditional_scale[..., None, None] * self.bases.prior_scale
        weight = torch.addcmul(self.bases.project(self.inducing), coefficient, self.noise)
        return weight.reshape(*weight.shape[:-2], *self.event_shape)

    def apply(self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``linear_map(x, W) + bias`` by two products of the weight's size instead of three."""
        bases, noise = self.bases, self.noise
        hidden = linear_map.bank(x, bases.columns)
        low_rank = linear_map.mix(linear_map.mix(hidden, self.inducing), bases.rows.mT, bias)
        coefficient = bases.conditional_scale
        if bases.has_one_scale:
            coefficient = coefficient * bases.prior_scale[..., 0, 0]
        else:
            noise = noise * bases.prior_scale
        return torch.addcmul(low_rank, coefficient, linear_map(x, noise))


class MatheronOutputs(GaussianOutputs):
    r"""Outputs of a weight with inducing weights, drawn without forming the weight.

    .. math:: y = B_r^\top (\tilde U h) + \lambda n, \qquad n \sim N(0, |\sigma x|^2 I - |h|^2 P_r),
        \qquad h = B_c (\sigma x),

    .. math:: n = a e - \left(a - \sqrt{a^2 - |h|^2}\right) B_r^\top (B_r e - H_r g), \qquad
        a = |\sigma x|,

    with standard normal e of size ``out`` and g of size ``M_out``. With independent inducing weights an
    example takes ``in M_in + 2 M_in M_out + M_out^2 + 2 out M_out`` multiplications.
    """

    def __init__(
        self,
        bases: MatheronBases,
        inducing: WeightDistribution,
        linear_map: LinearMap,
        x: Tensor,
        bias_loc: Tensor | None,
    ) -> None:
        self._bases, self._inducing, self._map = bases, inducing, linear_map
        self._bias_loc = bias_loc
        self._hidden = linear_map.bank(x, bases.columns)
        squared = linear_map.squared_norm(x, linear_map.groups)
        self._squared = bases.squared_norm(linear_map, x, squared)
        self._set_shapes(
            self._with_channels(self._hidden, bases.rows.shape[-1]),
            linear_map.event_dim(self._hidden),
        )

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        inner = self._map.mix(self._hidden, self._inducing.mean)
        return self._map.mix(inner, self._bases.rows.mT, self._bias_loc)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        sample, rows = torch.Size(sample_shape), self._bases.rows
        hidden, squared = self._repeat(self._hidden, sample), self._repeat(self._squared, sample)
        mix, scale = self._map.mix, self._bases.conditional_scale.unsqueeze(-1)
        overlap = hidden.square().sum(self._map.channel_dim, keepdim=True)
        least = 8 * torch.finfo(squared.dtype).eps * squared  # rounding leaves no less
        length = floored_sqrt(squared)
        known = length - floored_sqrt(torch.maximum(squared - overlap, least))
        length, known = length.to(hidden), known.to(hidden)  # as the bases, in half precision, too
        noise = standard_normal(self._with_channels(hidden, rows.shape[-1]), hidden)
        inner = self._apply_inducing(hidden).to(hidden)
        seen = mix(noise, rows) - mix(torch.randn_like(inner), self._bases.remainder)
        inner = torch.addcmul(inner, scale * known, seen, value=-1)
        outputs = mix(inner, rows.mT, self._bias_loc)
        outputs = torch.addcmul(outputs, scale * length, noise)
        return outputs.to(noise.dtype).reshape(self._extended_shape(sample))

    def _with_channels(self, hidden: Tensor, channels: int) -> torch.Size:
        """Return the shape of ``hidden`` with another number of channels."""
        shape = list(hidden.shape)
        shape[self._map.channel_dim] = channels
        return torch.Size(shape)

    def _apply_inducing(self, hidden: Tensor) -> Tensor:
        """Draw the inducing weights times ``hidden``, with one draw for all positions of an example."""
        event_dim, channel = len(self.event_shape), self._map.channel_dim
        if event_dim == 1:
            return self._inducing.image_under(DenseMap(False), hidden).rsample()
        draws = self._inducing.rsample(hidden.shape[: hidden.dim() - event_dim])
        if channel == -1:
            return (hidden.flatten(-event_dim, -2) @ draws.mT).reshape(*hidden.shape[:-1], -1)
        columns: Tensor = draws @ hidden.flatten(channel + 1)
        return columns.reshape(*columns.shape[:-1], *hidden.shape[channel + 1 :])

    def _repeat(self, tensor: Tensor, sample: torch.Size) -> Tensor:
        """Repeat for each draw; with positions, the draws become examples of the batch."""
        if not sample:
            return tensor
        repeated = tensor.expand(*sample, *tensor.shape)
        event_dim = len(self.event_shape)
        return repeated if event_dim == 1 else repeated.reshape(-1, *tensor.shape[-event_dim:])

    # ---- moments ---------------------------------------------------------------------------------

    @property
    def variance(self) -> Tensor:
        hidden, squared = self._at_positions(self._hidden), self._at_positions(self._squared)
        variance = self._bases.variance(self._inducing, hidden, squared)
        native = variance if self._map.channel_dim == -1 else variance.mT
        return native.reshape(self._extended_shape())

    @property
    def covariance_matrix(self) -> Tensor:
        if len(self.event_shape) == 1:
            return self._covariance_of_channels()
        hidden, squared = self._at_positions(self._hidden), self._at_positions(self._squared)
        gain = torch.einsum("...ai,...pb->...piab", self._bases.rows, hidden).flatten(-2)
        own = (self._bases.squared_scale * squared).expand(gain.shape[:-1])
        seen = self._bases.squared_scale.unsqueeze(-1) * (gain @ gain.mT)
        noise = torch.diag_embed(own) - seen
        positions = torch.eye(hidden.shape[-2], dtype=hidden.dtype, device=hidden.device)
        order = "piqk" if self._map.channel_dim == -1 else "ipkq"
        shared = self._inducing.covariance_matrix
        covariance: Tensor = torch.einsum(f"...pik,pq->...{order}", noise, positions)
        covariance = covariance + torch.einsum(
            f"...pim,...mn,...qkn->...{order}", gain, shared, gain
        )
        return covariance.flatten(-2).flatten(-3, -2)

    def _covariance_of_channels(self) -> Tensor:
        """Return the covariance at one position, by no matrix over all inducing weights."""
        rows, squared_scale = self._bases.rows, self._bases.squared_scale
        seen = self._inducing.image_under(DenseMap(False), self._hidden).covariance_matrix
        overlap = self._hidden.square().sum(-1)[..., None, None] * squared_scale
        own = (squared_scale[..., 0] * self._squared).expand(self.batch_shape + self.event_shape)
        covariance: Tensor = rows.mT @ (seen - overlap * identity_like(seen)) @ rows
        return covariance + torch.diag_embed(own)

    def _at_positions(self, tensor: Tensor) -> Tensor:
        """View ``(*batch, *event)`` as ``(*batch, positions, channels)``."""
        channels_last = tensor.movedim(self._map.channel_dim, -1).unsqueeze(-2)
        return channels_last.flatten(-len(self.event_shape) - 1, -2)

    @property
    def _dense(self) -> MultivariateNormal:
        if getattr(self._inducing, "is_mixture", False):
            raise NotImplementedError(
                "Outputs of a mixture of normals have draws and moments only."
            )
        return super()._dense
