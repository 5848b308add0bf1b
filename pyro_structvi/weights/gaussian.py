"""Gaussian distributions over weights, correlated or independent."""

import math
from typing import Any, ClassVar, Self

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyro_structvi.linalg.matrices import event_sum, standard_normal
from pyro_structvi.linalg.precision import autocast_off
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.weights import arguments
from pyro_structvi.weights.outputs import NormalOutputs, autocasts, bias_moments
from pyro_structvi.weights.weight_distribution import WeightDistribution


def noise_columns(q: Any) -> Tensor:
    """Return the columns of ``A``, ``(noise, *batch_shape, *event_shape)``; for small sizes."""
    size, like = q.noise_shape.numel(), q._first_parameter
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    noise = unit.reshape(size, *(1 for _ in q.batch_shape), *q.noise_shape)
    columns: Tensor = q.scale_noise(noise.expand(size, *q.batch_shape, *q.noise_shape))
    return columns


class GaussianWeight(WeightDistribution, abstract=True):
    r"""A weight :math:`W = \mu + A e` with standard normal noise :math:`e`.

    **Required**, or the definition of the class raises a ``TypeError``: ``arg_constraints`` with
    ``"loc"`` first, or annotations in its place; ``scale_noise``, that is :math:`A e`; ``whiten``, that
    is :math:`A^{-1} d` (or ``mahalanobis`` in its place, if A is not square);
    ``log_det_covariance``; ``output_variance``, the variances of the outputs of a linear map where these
    are independent, or ``image_around``, their distribution.

    **Optional**, beside what :class:`WeightDistribution` lists: ``noise_shape``, where ``e`` does not
    have the event's shape; ``variance``, without which it is the diagonal of the dense covariance.

    **Provided**: ``rsample``, ``covariance_matrix``, ``mahalanobis``, ``log_prob``, ``entropy``,
    ``image_under`` with biases, ``trace_and_log_det``, and what :class:`WeightDistribution` provides.
    """

    _required: ClassVar[dict[str, tuple[str, ...]]] = {
        "arg_constraints": (),
        "scale_noise": ("rsample covariance_matrix",),
        "whiten": ("mahalanobis",),
        "log_det_covariance": (),
        "output_variance": ("image_around", "image_under"),
    }

    # ---- required --------------------------------------------------------------------------------

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Return ``A e`` for ``e (*sample_shape, *batch_shape, *noise_shape)``, of a weight's shape."""
        raise NotImplementedError

    def whiten(self, difference: Tensor) -> Tensor:
        """Return the noise ``A^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        raise NotImplementedError

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        raise NotImplementedError

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        """Return the variances of ``linear_map(x, W)``, if its outputs are independent."""
        raise NotImplementedError

    # ---- optional --------------------------------------------------------------------------------

    @property
    def noise_shape(self) -> torch.Size:
        """The shape of the noise ``e`` of one weight."""
        return torch.Size(self.event_shape)

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        diagonal = self.covariance_matrix.diagonal(dim1=-2, dim2=-1)
        return diagonal.reshape(*self.batch_shape, *self.event_shape)

    def image_around(
        self, mean: Tensor, linear_map: LinearMap, x: Tensor, bias_variance: Tensor | None
    ) -> TorchDistribution:
        """Return the distribution of ``linear_map(x, W) + bias`` around its mean.

        The mean is that of map and bias together; ``bias_variance (out,)`` is None for a known bias.
        """
        return NormalOutputs(linear_map, mean, self.output_variance(linear_map, x), bias_variance)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        """Return ``variance_sum`` and ``log_det_covariance``, for a KL that needs both."""
        return self.variance_sum, self.log_det_covariance

    # ---- provided --------------------------------------------------------------------------------

    mode = property(lambda self: self.mean, doc="The mode, which is the mean.")

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)`` of the row-major weight; for small sizes."""
        matrix = noise_columns(self).flatten(1 + len(self.batch_shape)).movedim(0, -1)
        return matrix @ matrix.mT

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        shape = (
            arguments.as_size("sample_shape", sample_shape) + self.batch_shape + self.noise_shape
        )
        return self.loc + self.scale_noise(standard_normal(shape, self._first_parameter))

    def mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        return event_sum(self.whiten(difference).square(), len(self.event_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of weights, in nats, with shape ``(*sample, *batch_shape)``."""
        if self._validate_args:
            self._validate_sample(value)
        size: int = self.event_shape.numel()
        distance = self.mahalanobis(value - self.loc) + self.log_det_covariance
        return -0.5 * (distance + size * math.log(2 * math.pi))

    def entropy(self) -> Tensor:
        """Return the differential entropy ``(*batch_shape,)``, in nats."""
        size: int = self.event_shape.numel()
        return 0.5 * (self.log_det_covariance + size * (1 + math.log(2 * math.pi)))

    def _image_variance(self, linear_map: LinearMap, x: Tensor, mean: Tensor) -> Tensor:
        hooks = ("output_variance", "image_around")
        if all(getattr(type(self), name) is getattr(GaussianWeight, name) for name in hooks):
            return super()._image_variance(linear_map, x, mean)  # by the class's own `image_under`
        linear_map = self.map_for_batch(linear_map)
        variance: Tensor = self.image_around(mean, linear_map, x, None).variance
        return variance

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | WeightDistribution | None = None
    ) -> TorchDistribution:
        """Do as the base class, with variances in the precision of the parameters."""
        linear_map = self.map_for_batch(linear_map)
        bias_loc, bias_variance = bias_moments(bias)
        mean = linear_map(x, self.as_matrix(self.loc), bias_loc)
        if not autocasts(x):
            return self.image_around(mean, linear_map, x, bias_variance)
        with autocast_off(x):
            return self.image_around(mean, linear_map, x.to(self.loc.dtype), bias_variance)


class IndependentWeight(GaussianWeight, abstract=True):
    """Independent normals with the standard deviations ``stddev``.

    **Required**: ``arg_constraints``; ``stddev``, of the weight's shape;
    ``output_variance`` or ``image_around``. **Optional**: any member that is cheaper than by ``stddev``.
    """

    has_independent_elements = True
    _required: ClassVar[dict[str, tuple[str, ...]]] = {
        "arg_constraints": (),
        "stddev": (),
        "output_variance": ("image_around", "image_under"),
    }

    @property
    def stddev(self) -> Tensor:
        """The standard deviation of each weight, ``(*batch_shape, *event_shape)``."""
        raise NotImplementedError

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        return self.stddev.square()

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)``, diagonal."""
        return torch.diag_embed(self.variance.reshape(*self.batch_shape, -1))

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        return 2 * self._event_sum(self.stddev.log())

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Return the noise times the standard deviations."""
        return noise * self.stddev

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        samples = arguments.as_size("sample_shape", sample_shape)
        noise = standard_normal(
            samples + self.batch_shape + self.event_shape, self._first_parameter
        )
        return torch.addcmul(self.loc, noise, self.stddev)  # one pass over memory, not two

    def spread(self, moment: Tensor) -> Tensor:
        """Return the diagonal matrices of ``sum_j Var(W_ij) S_jj``."""
        diagonal = moment.diagonal(dim1=-2, dim2=-1)
        return torch.diag_embed(diagonal @ self.as_matrix(self.variance).mT)

    def whiten(self, difference: Tensor) -> Tensor:
        """Return the difference in standard deviations."""
        return difference / self.stddev

    def _member(self, index: int) -> Self:
        """Return the distribution of one weight of the first batch dimension."""
        new: Self = self._get_checked_instance(type(self))
        for name in self.argument_names:
            setattr(new, name, getattr(self, name)[index])
        new._set_shapes(self.batch_shape[1:], self.event_shape, self._validate_args)
        return new
