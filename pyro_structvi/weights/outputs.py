"""Distributions of the outputs of a linear map whose weight is random."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from pyro_structvi._torch import inside_transform
from pyro_structvi.linalg.matrices import event_sum, standard_normal
from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.maps.linear_map import LinearMap, shape_per_example


class OutputDistribution(TorchDistribution):
    """The distribution of the outputs of a linear map, independent over the examples of a batch.

    A subclass defines ``variance``, ``covariance_matrix`` and ``rsample``.

    Args:
        loc: The mean, ``(*batch_shape, *event_shape)``.
        event_dim: How many trailing dimensions are the outputs of one example.

    Attributes:
        loc: The mean.
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
        """The mean, ``(*batch_shape, *event_shape)``."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``(*batch_shape, *event_shape)``."""
        raise NotImplementedError

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)`` for E outputs; for small sizes."""
        raise NotImplementedError

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw outputs ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        raise NotImplementedError


class GaussianOutputs(OutputDistribution):
    """Outputs with a normal distribution; the density is NaN where the covariance is singular."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of outputs, in nats, ``(*sample_shape, *batch_shape)``."""
        flat = value.flatten(value.dim() - len(self.event_shape))
        log_density: Tensor = self._dense.log_prob(flat)
        return log_density

    def entropy(self) -> Tensor:
        """Return the differential entropy ``(*batch_shape,)``, in nats."""
        nats: Tensor = self._dense.entropy()
        return nats

    @property
    def _dense(self) -> MultivariateNormal:
        tril, info = torch.linalg.cholesky_ex(self.covariance_matrix)
        factor = tril.masked_fill((info > 0)[..., None, None], torch.nan)
        loc = self.loc.flatten(len(self.batch_shape))
        return MultivariateNormal(loc, scale_tril=factor, validate_args=False)


class NormalOutputs(GaussianOutputs):
    """Independent normals over the outputs of a map.

    Args:
        linear_map: The map.
        mean: Means, of the shape of its outputs.
        variance: Variances, of the same shape.
        bias_variance: Variances ``(out,)`` that are still to be added to these, or None.
    """

    def __init__(
        self,
        linear_map: LinearMap,
        mean: Tensor,
        variance: Tensor,
        bias_variance: Tensor | None = None,
    ) -> None:
        super().__init__(mean, linear_map.event_dim(mean))
        if bias_variance is not None:
            variance = variance + meet_channels(linear_map, bias_variance)
        self._variance = variance

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``(*batch_shape, *event_shape)``."""
        return self._variance

    @property
    def scale(self) -> Tensor:
        """The standard deviation of each output, at least a tiny positive number."""
        return floored_sqrt(self._variance)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)``, diagonal."""
        return torch.diag_embed(self._variance.flatten(len(self.batch_shape)))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw outputs ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return draw_normal(self.loc.expand(shape), self._variance.expand(shape), noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of outputs, in nats, ``(*sample_shape, *batch_shape)``."""
        return event_sum(self._normal.log_prob(value), len(self.event_shape))

    def entropy(self) -> Tensor:
        """Return the differential entropy ``(*batch_shape,)``, in nats."""
        return event_sum(self._normal.entropy(), len(self.event_shape))

    @property
    def _normal(self) -> Normal:
        return Normal(self.loc, self.scale, validate_args=False)


def square(x: Tensor) -> Tensor:
    """Return ``x^2``, with a gradient of one pass."""
    squares: Tensor = x.square() if inside_transform() else Square.apply(x)
    return squares


def draw_normal(mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """Return ``mean + sqrt(variance) * noise``, the variance with a floor as in ``floored_sqrt``."""
    is_narrow = torch.finfo(variance.dtype).bits < 32
    if is_narrow or inside_transform() or not mean.dtype == variance.dtype == noise.dtype:
        return mean + floored_sqrt(variance) * noise
    draws: Tensor = DrawNormal.apply(mean, variance, noise)
    return draws


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def meet_channels(linear_map: LinearMap, values: Tensor) -> Tensor:
    """Shape one number for each channel, ``(*batch, out)``, so that it broadcasts to the outputs."""
    space = [1 for _ in range(-linear_map.channel_dim - 1)]
    return values.reshape(*values.shape, *space)


def bias_columns(linear_map: LinearMap, bias_variance: Tensor, event_shape: torch.Size) -> Tensor:
    """Return vectors whose outer products add up to the covariance of a bias that positions share.

    Args:
        linear_map: The map.
        bias_variance: Variances ``(out,)``.
        event_shape: The shape of an example's outputs.

    Returns:
        One vector for each channel, ``(out, *event_shape)``.
    """
    scales = torch.diag(bias_variance.sqrt())
    before = [1 for _ in range(len(event_shape) + linear_map.channel_dim)]
    columns = meet_channels(linear_map, scales).reshape(
        len(scales), *before, *meet_channels(linear_map, bias_variance).shape
    )
    return columns.expand(-1, *event_shape)


def draw_shared_bias(linear_map: LinearMap, bias_variance: Tensor, x: Tensor) -> Tensor:
    """Draw the noise of a bias once for each example, shaped to meet the outputs at all positions."""
    shape = shape_per_example(linear_map, x, len(bias_variance))
    return meet_channels(linear_map, floored_sqrt(bias_variance)) * standard_normal(shape, x)


def grouped_variance(
    matrix: Tensor, covariance: Tensor, linear_map: LinearMap, x: Tensor
) -> Tensor:
    """Return the variances of outputs under a map of several groups, by the covariance of each row.

    Args:
        matrix: The weight's mean ``(out, in)``, for its shape.
        covariance: The weight's dense covariance.
        linear_map: The map.
        x: Its input.
    """
    channel_dim, (out, size) = linear_map.channel_dim, matrix.shape
    rows = covariance.reshape(out, size, out, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    rows = rows.unflatten(0, (linear_map.groups, -1))
    patches = linear_map.bank(x, torch.eye(size, dtype=x.dtype, device=x.device))
    patches = patches.movedim(channel_dim, -1).unflatten(-1, (linear_map.groups, size))
    variance = torch.einsum("...ga,goab,...gb->...go", patches, rows, patches)
    return variance.flatten(-2).movedim(-1, channel_dim)


def flipout(q: Any, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Draw the outputs of a map whose weight has independent elements, symmetric about their means.

    .. math:: y_n = M x_n + r_n \circ \Delta (s_n \circ x_n), \qquad \Delta = W - M

    with one draw of :math:`\Delta` and, for each example, signs r of the output channels and s of the
    input channels. The outputs of an example, at all positions, have the distribution that a drawn
    weight gives; those of different examples are uncorrelated given their inputs.

    Args:
        q: A distribution with independent elements.
        linear_map: A dense map or a convolution.
        x: Its input, the first dimension of which is the batch.
        bias: Nothing, or a tensor ``(out,)``.

    Returns:
        The outputs.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.maps import DenseMap
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> y = flipout(q, DenseMap(), torch.ones(4, 1, 3).expand(4, 2, 3))
        >>> bool((y[:, 0] == y[:, 1]).all()), bool((y[0] == y[1]).all())
        (True, False)

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


class Square(torch.autograd.Function):
    """``x^2``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the squares, and keep the input."""
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        squares: Tensor = x.square()
        return squares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return ``2 x g``."""
        (x,) = ctx.saved_tensors
        return torch.addcmul(x.new_zeros(()), x, gradient, value=2)

    @staticmethod
    def jvp(ctx: Any, change: Tensor) -> Tensor:
        """Return ``2 x dx``."""
        (x,) = ctx.saved_tensors
        tangent: Tensor = 2 * x * change
        return tangent


class DrawNormal(torch.autograd.Function):
    """``mean + sqrt(variance) * noise``; noise takes no gradient."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
        """Return the draws, and keep noise over deviation, which is zero where the floor is."""
        least = torch.finfo(variance.dtype).tiny
        scale = variance.clamp_min(least).sqrt_()
        draws = torch.addcmul(mean, noise, scale)
        ratio = noise / F.threshold(scale, 1.01 * least**0.5, math.inf, inplace=True)
        ctx.save_for_backward(variance, ratio)
        ctx.save_for_forward(variance, ratio)
        return draws

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Hand the gradient on to the mean, and half of it times the ratio to the variance."""
        variance, ratio = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        if torch.is_grad_enabled():  # to be differentiated again
            scale = floored_sqrt(variance)
            ratio = (ratio * scale).detach() / scale
        return gradient, torch.addcmul(ratio.new_zeros(()), gradient, ratio, value=0.5), None

    @staticmethod
    def jvp(ctx: Any, of_mean: Tensor | None, of_variance: Tensor | None, _: None) -> Tensor:
        """Return the change of the mean, and half of the variance's times the ratio."""
        _variance, ratio = ctx.saved_tensors
        tangent = torch.zeros_like(ratio) if of_mean is None else of_mean
        return tangent if of_variance is None else tangent + 0.5 * ratio * of_variance
