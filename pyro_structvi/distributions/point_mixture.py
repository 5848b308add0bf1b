"""A mixture of point masses: the posterior of an ensemble."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import checked, shape_text, validates
from pyro_structvi.distributions.arguments import as_size, check_parameters
from pyro_structvi.distributions.outputs import (
    OutputDistribution,
    bias_columns,
    bias_moments,
    draw_shared_bias,
    meet_channels,
)
from pyro_structvi.distributions.weight_distribution import WeightDistribution
from pyro_structvi.maps import LinearMap


class PointMixture(WeightDistribution):
    r"""One of K known weights, each with probability 1/K; a point mass for K = 1.

    .. math:: W \sim \frac1K \sum_k \delta(W - W_k)

    It has draws, moments and an image, and no density: ``log_prob``, ``entropy`` and the KL to a normal
    raise a ``NotImplementedError``. A draw passes its gradient to the member that was drawn.

    Args:
        members: The weights, ``(*batch, K, out, *rest)``.
        event_dim: How many trailing dimensions are the weight; all but the first of ``members`` when
            None.
        validate_args: Pyro's own setting when None.

    Raises:
        ValueError: If ``members`` has no dimension in front of the weight's own.

    Example:
        >>> q = PointMixture(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]))
        >>> q.mean, q.variance
        (tensor([[2., 0.]]), tensor([[1., 0.]]))

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", section 3.1.
    """

    arg_constraints: ClassVar = {"members": constraints.real}
    has_exact_positions = True
    members: Tensor

    @checked
    def __init__(
        self, members: Tensor, event_dim: int | None = None, validate_args: bool | None = None
    ) -> None:
        event_dim = members.dim() - 1 if event_dim is None else event_dim
        if members.dim() <= event_dim:
            raise ValueError(
                "`members` must have shape (*batch, K, *event) with an event of "
                f"{event_dim} dimensions, but got {shape_text(members.shape)}. Write "
                "`weight.unsqueeze(0)` for a single one, or pass another `event_dim`."
            )
        if validates(validate_args):
            check_parameters(self, {"members": members}, event_dim)
        self.members = members
        split = members.dim() - event_dim
        self._set_shapes(members.shape[: split - 1], members.shape[split:], validate_args)

    @property
    def is_mixture(self) -> bool:
        """Whether there are several weights."""
        return self.members.shape[self._member_dim] > 1

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        """The mean, ``(*batch_shape, *event_shape)``."""
        return self.members.mean(self._member_dim)

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        return self.members.var(self._member_dim, correction=0)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)``, of rank K - 1."""
        event_dim = len(self.event_shape)
        deviations = (self.members - self.loc.unsqueeze(self._member_dim)).flatten(-event_dim)
        return deviations.mT @ deviations / deviations.shape[-2]

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw members ``(*sample_shape, *batch_shape, *event_shape)``."""
        sample = as_size("sample_shape", sample_shape)
        shape = self._extended_shape(sample)
        batch, count = self.batch_shape.numel(), self.members.shape[self._member_dim]
        if count == 1:
            draw = self.members.squeeze(self._member_dim)
            return draw.expand(shape) if sample else draw.clone()
        members = self.members.reshape(batch, count, *self.event_shape)
        chosen = torch.randint(count, (sample.numel(), batch), device=members.device)
        return members[torch.arange(batch, device=members.device), chosen].reshape(shape)

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> "_MixtureOutputs":
        """Return the distribution of ``linear_map(x, W) + bias``, exact over positions too.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            bias: None, a tensor ``(out,)``, or the distribution of one with independent elements.

        Returns:
            A mixture of the K outputs of each example.
        """
        linear_map = self.map_for_batch(linear_map)
        bias_loc, bias_variance = bias_moments(bias)
        count, out = self.members.shape[self._member_dim], self.event_shape[0]
        images = linear_map.stack(x, self.members.reshape(*self.batch_shape, count, out, -1))
        if bias_loc is not None:
            images = images + meet_channels(linear_map, bias_loc)
        return _MixtureOutputs(linear_map, x, images, bias_variance)

    @property
    def _member_dim(self) -> int:
        return -len(self.event_shape) - 1


class _MixtureOutputs(OutputDistribution):
    """One of K known outputs for each example, plus the noise of an independent bias."""

    def __init__(
        self, linear_map: LinearMap, x: Tensor, images: Tensor, bias_variance: Tensor | None
    ) -> None:
        event_dim = linear_map.event_dim(images.flatten(0, 1))
        self._points = PointMixture(images, event_dim, validate_args=False)
        super().__init__(self._points.loc, event_dim)
        self._map, self._x, self._bias_variance = linear_map, x, bias_variance

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``(*batch_shape, *event_shape)``."""
        variance = self._points.variance
        if self._bias_variance is None:
            return variance
        return variance + meet_channels(self._map, self._bias_variance)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)`` for E outputs."""
        covariance = self._points.covariance_matrix
        if self._bias_variance is None:
            return covariance
        biases = bias_columns(self._map, self._bias_variance, self.event_shape).flatten(1)
        return covariance + biases.mT @ biases

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw outputs ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        draws = self._points.rsample(sample_shape)
        if self._bias_variance is None:
            return draws
        x = self._x.expand(*torch.Size(sample_shape), *self._x.shape)
        return draws + draw_shared_bias(self._map, self._bias_variance, x)
