"""Distributions of the outputs of a linear map whose weight is random."""

from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from pyro_structvi.linalg.factorizations import tril_or_nan
from pyro_structvi.linalg.matrices import event_sum, floored_sqrt, standard_normal
from pyro_structvi.maps.linear_map import DenseMap, LinearMap, shape_per_example


class OutputDistribution(TorchDistribution):
    """The distribution of the outputs of a linear map, independent over the examples of a batch.

    A subclass defines ``variance (*batch_shape, *event_shape)``, ``covariance_matrix (*batch_shape, E,
    E)`` of E outputs for small sizes, and ``rsample``. The mean ``loc`` is ``(*batch_shape,
    *event_shape)`` with ``event_dim`` trailing dimensions of one example.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}
    loc: Tensor

    def __init__(self, loc: Tensor, event_dim: int) -> None:
        self.loc = loc
        self._set_shapes(loc.shape, event_dim)

    def _set_shapes(self, shape: torch.Size, event_dim: int) -> None:
        split = len(shape) - event_dim
        super().__init__(shape[:split], shape[split:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)`` for E outputs; for small sizes."""
        raise NotImplementedError


class GaussianOutputs(OutputDistribution):
    """Normal outputs; the density is NaN if the covariance is singular."""

    def log_prob(self, value: Tensor) -> Tensor:
        flat = value.flatten(value.dim() - len(self.event_shape))
        return self._dense.log_prob(flat)

    def entropy(self) -> Tensor:
        return self._dense.entropy()

    @property
    def _dense(self) -> MultivariateNormal:
        factor = tril_or_nan(self.covariance_matrix)
        loc = self.loc.flatten(len(self.batch_shape))
        return MultivariateNormal(loc, scale_tril=factor, validate_args=False)


class NormalOutputs(GaussianOutputs):
    """Independent normals over the outputs of a map, whose variances have the shape of the mean."""

    def __init__(self, linear_map: LinearMap, mean: Tensor, variance: Tensor) -> None:
        super().__init__(mean, linear_map.event_dim(mean))
        self._variance = variance

    @property
    def variance(self) -> Tensor:
        return self._variance

    @property
    def scale(self) -> Tensor:
        return floored_sqrt(self._variance)

    @property
    def covariance_matrix(self) -> Tensor:
        return torch.diag_embed(self._variance.flatten(len(self.batch_shape)))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = standard_normal(shape, self.loc)
        return torch.addcmul(self.loc, noise, floored_sqrt(self._variance))

    def log_prob(self, value: Tensor) -> Tensor:
        return event_sum(self._normal.log_prob(value), len(self.event_shape))

    def entropy(self) -> Tensor:
        return event_sum(self._normal.entropy(), len(self.event_shape))

    @property
    def _normal(self) -> Normal:
        return Normal(self.loc, self.scale, validate_args=False)


class MixedOutputs(GaussianOutputs):
    """Normals ``loc + F (scales * e)`` over channels, independent over positions.

    ``scales`` have channels last, ``(*batch, *positions, out)`` or ``(..., 1)``; the matrix F is
    ``(*batch, out, out)``.
    """

    def __init__(self, linear_map: LinearMap, loc: Tensor, scales: Tensor, factor: Tensor) -> None:
        super().__init__(loc, linear_map.event_dim(loc))
        self._channel_dim = linear_map.channel_dim
        self._scales, self._factor = scales, factor

    @property
    def variance(self) -> Tensor:
        squares = self._factor.to(self._scales.dtype).square()
        if self._scales.shape[-1] == 1:
            squares = squares.sum(-1, keepdim=True)
        return DenseMap()(self._scales.square(), squares).movedim(-1, self._channel_dim)

    @property
    def covariance_matrix(self) -> Tensor:
        scaled = self._factor * self._scales.unsqueeze(-2)
        blocks = scaled @ scaled.mT
        positions = blocks.shape[len(self.batch_shape) : -2].numel()
        blocks = blocks.reshape(*self.batch_shape, positions, *blocks.shape[-2:])
        identity = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
        order = "piqj" if self._channel_dim == -1 else "ipjq"
        product = torch.einsum(f"...pij,pq->...{order}", blocks, identity)
        return product.flatten(-2).flatten(-3, -2)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        channels_last = list(self._extended_shape(torch.Size(sample_shape)))
        channels_last.append(channels_last.pop(self._channel_dim))
        noise = self._scales * standard_normal(channels_last, self.loc)
        draws = DenseMap()(noise.to(self._factor.dtype), self._factor)
        return self.loc + draws.movedim(-1, self._channel_dim)


def meet_channels(linear_map: LinearMap, values: Tensor) -> Tensor:
    """Reshape numbers ``(*batch, out)`` to broadcast to the outputs."""
    space = [1 for _ in range(-linear_map.channel_dim - 1)]
    return values.reshape(*values.shape, *space)


def dense_output_variance(out: int, covariance: Tensor, linear_map: LinearMap, x: Tensor) -> Tensor:
    """Return the variances of outputs by the dense covariance ``(D, D)`` of the weight."""
    channel_dim, size = linear_map.channel_dim, covariance.shape[-1] // out
    rows = covariance.reshape(out, size, out, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    rows = rows.unflatten(0, (linear_map.groups, -1))
    patches = linear_map.bank(x, torch.eye(size, dtype=x.dtype, device=x.device))
    patches = patches.movedim(channel_dim, -1).unflatten(-1, (linear_map.groups, size))
    # Two products: torch has graphs of one batch size only for einsum of three tensors.
    half = torch.einsum("...ga,goab->...gob", patches, rows)
    variance = torch.einsum("...gob,...gb->...go", half, patches)
    return variance.flatten(-2).movedim(-1, channel_dim)


def flipout(q: Any, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Sample the outputs of a linear map by flipout, for a Gaussian with independent elements.

    .. math:: y_n = M x_n + r_n \circ \Delta (s_n \circ x_n), \qquad \Delta = W - M

    with one sample of :math:`\Delta`, and random signs r of the output channels and s of the input
    channels for each example. The outputs of one example have their exact distribution over all
    positions; outputs of different examples are uncorrelated given the inputs.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> flipout(q, DenseMap(), torch.ones(4, 5, 3)).shape
        torch.Size([4, 5, 2])

    References:
        Wen, Vicol, Ba, Tran and Grosse (2018), "Flipout: efficient pseudo-independent weight
        perturbations on mini-batches", Eq. 3.
    """
    channels = x.shape[linear_map.channel_dim]
    inputs = x * _signs(shape_per_example(linear_map, x, channels), x)
    perturbation = q.as_matrix(q.scale_noise(standard_normal(q.noise_shape, q.loc)))
    outputs = linear_map(inputs, perturbation)
    signs = _signs(shape_per_example(linear_map, x, q.event_shape[0]), outputs)
    return linear_map(x, q.as_matrix(q.loc), bias) + signs * outputs


def _signs(shape: list[int], like: Tensor) -> Tensor:
    return 2 * torch.randint(2, shape, dtype=like.dtype, device=like.device) - 1
