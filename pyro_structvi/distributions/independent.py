"""Base class of normals with independent elements."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pyro_structvi.distributions import arguments
from pyro_structvi.distributions.gaussian_weight import GaussianWeight
from pyro_structvi.linalg.shapes import standard_normal


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
