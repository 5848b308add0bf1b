"""The contract: what every distribution over a weight must define, may define, and obeys."""

import math
from typing import Any, ClassVar, Protocol, Self

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_structvi._checks import check_same_kind
from pyro_structvi.lazy.weight import LazyWeight, SiteUse, weights_wait_now
from pyro_structvi.maps.linear_maps import DenseMap, LinearMap


class FactoredDraw(Protocol):
    """One draw of a weight that can be applied without being formed."""

    def weight(self) -> Tensor:
        """Return the weight."""

    def apply(self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``linear_map(x, W) + bias``."""


class WeightDistribution(TorchDistribution):
    r"""A Gaussian over a weight :math:`W` that knows the law of :math:`W x`.

    The event shape is the weight's own, ``(out, *rest)``, seen as a matrix ``(out, in)`` with
    ``in = prod(rest)``; a vector ``(out,)`` is the matrix ``(out, 1)``. Batch dimensions come in
    front. All covariances are over the row-major ``vec(W)``, of length ``D = out * in``.

    A structure obeys these laws, and is tested for each:

    1. ``rsample`` has ``mean`` and ``covariance_matrix``.
    2. ``log_prob`` and ``entropy`` are those of the dense multivariate normal.
    3. ``kl_divergence(q, p)`` is the dense one, for every independent normal ``p``.
    4. ``image(x)`` has the mean and covariance of ``W x``.
    5. Gradients equal those of the dense path.
    6. ``expand`` and batches commute with all of these.

    **A structure must define** ``arg_constraints``, ``_parameters`` (the names of its arguments,
    ``loc`` first, each with batch dimensions in front), ``variance``, ``covariance_matrix``,
    ``log_det_covariance``, ``_mahalanobis``, ``_perturbation`` and ``image_under``.

    **It may define** ``variance_sum``, where that is cheaper than summing ``variance``;
    ``trace_and_log_det``, where the two share work; ``has_independent_elements``, where the covariance
    is diagonal; ``split_noise``, where a part of it is; ``has_exact_positions``, where its images
    are exact over the positions of an example too; and ``rows``, where some rows cost less than all.

    Attributes:
        loc: The mean, ``(*batch_shape, *event_shape)``.
        site_use: Set by a guide: how a draw at its sample site may be put off. None by default, and
            then a draw is an ordinary tensor.
    """

    has_rsample = True
    has_independent_elements: ClassVar[bool] = False
    has_exact_positions: ClassVar[bool] = False
    takes_bias_column: ClassVar[bool] = False
    has_factored_draws: ClassVar[bool] = False
    _parameters: ClassVar[tuple[str, ...]]
    loc: Tensor

    def __init__(
        self, parameters: dict[str, Tensor], event_dim: int, validate_args: bool | None
    ) -> None:
        for name, value in parameters.items():
            setattr(self, name, value)
        split = self.loc.dim() - event_dim
        self._set_shapes(self.loc.shape[:split], self.loc.shape[split:], validate_args)
        if self._validate_args:
            for name, value in parameters.items():
                check_same_kind(name, value, "loc", self.loc)

    def _set_shapes(
        self, batch_shape: torch.Size, event_shape: torch.Size, validate_args: bool | None
    ) -> None:
        self.site_use: SiteUse | None = None
        super().__init__(batch_shape, event_shape, validate_args=False)
        if validate_args is None:
            validate_args = Distribution._validate_args
        self._validate_args: bool = validate_args

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """Every real tensor of the event shape."""
        return constraints.independent(constraints.real, len(self.event_shape))

    # ---- what a structure must define ------------------------------------------------------------

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        raise NotImplementedError

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)`` of the row-major weight; for small sizes."""
        raise NotImplementedError

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        raise NotImplementedError

    def _mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample, *batch_shape, *event_shape)``."""
        raise NotImplementedError

    def _perturbation(self, shape: torch.Size) -> Tensor:
        """Draw ``W - loc`` with shape ``(*sample_shape, *batch_shape, *event_shape)``."""
        raise NotImplementedError

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> TorchDistribution | None:
        """Return the law of ``linear_map(x, W) + bias``, independent over examples.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            bias: Nothing, a tensor ``(out,)``, or the distribution of one with independent elements,
                independent of ``W`` too.

        Returns:
            A distribution over the map's whole output, or None where this structure has no image
            under that map; the weight is then drawn. Over the positions of one example the noise of
            independent elements is independent: each output has its exact law, correlations between
            positions are dropped.
        """
        raise NotImplementedError

    # ---- what a structure may define -------------------------------------------------------------

    def rows(self, index: Tensor) -> TorchDistribution | None:
        """Return the law of rows of one matrix ``W (num, dim)``, independent over examples.

        Args:
            index: Which rows, integers ``(batch, positions)``.

        Returns:
            A distribution over ``W[index]``, ``(batch, positions, dim)``, the last two of which are
            its event; or None, and the weight is then drawn. Over the positions of one example the
            noise of independent rows is independent, also where an index repeats: each row has its
            exact law. Noise that rows share is one draw for an example.
        """
        return None

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, ``(*batch_shape,)``."""
        return self._event_sum(self.variance)

    def trace_and_log_det(self) -> tuple[Tensor, Tensor]:
        """Return ``variance_sum`` and ``log_det_covariance``, for a KL that needs both."""
        return self.variance_sum, self.log_det_covariance

    def prefers_drawn_weight(self, linear_map: LinearMap, x: Tensor) -> bool:
        """Whether a drawn weight is cheaper here than drawn outputs, and nothing exact is lost."""
        return False

    def draws_in_factors(self, linear_map: LinearMap) -> bool:
        """Whether a drawn weight is better applied in factors under this map than formed."""
        return False

    def rsample_in_factors(self) -> "FactoredDraw":
        """Draw a weight that is not formed, where ``has_factored_draws``."""
        raise NotImplementedError

    def factorize(self) -> None:
        """Factor what draws and densities need, and keep it; where nothing is kept, do nothing."""

    def split_noise(
        self, sample_shape: torch.Size
    ) -> "tuple[WeightDistribution | None, Tensor | None]":
        """Split ``W`` into a part with independent elements, and draws of all the rest.

        Args:
            sample_shape: Shape of the draws.

        Returns:
            The law of the first part, and draws ``(*sample_shape, *batch_shape, *event_shape)`` of
            the second; None for a part that is nothing. Their sum has this distribution.
        """
        if self.has_independent_elements:
            return self, None
        return None, self.rsample(sample_shape)

    # ---- what follows ----------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """The mean, ``(*batch_shape, *event_shape)``."""
        return self.loc

    def image(self, x: Tensor) -> TorchDistribution:
        """Return the law of ``W x``, independently for every ``x``.

        Args:
            x: Inputs ``(*batch, in)``. Leading dimensions broadcast against ``batch_shape``.

        Returns:
            A distribution over ``(*batch, out)`` with ``mean``, ``variance``,
            ``covariance_matrix`` and ``rsample``; its event is the last dimension.

        Raises:
            ValueError: If the last dimension of ``x``, its dtype or device do not fit the weight.
        """
        size = self.event_shape[1:].numel()
        if x.dim() < 1 or x.shape[-1] != size:
            raise ValueError(
                f"`x` must have shape (*batch, in) with in = {size}, but got {tuple(x.shape)}."
            )
        check_same_kind("x", x, self._parameters[0], self._first_parameter)
        image = self.image_under(DenseMap(positions=False), x)
        assert image is not None, f"{type(self).__name__} must have an image under a dense map."
        return image

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        return self.loc + self._perturbation(self._extended_shape(torch.Size(sample_shape)))

    def __call__(self, sample_shape: Any = ()) -> Tensor:
        """Draw as ``pyro.sample`` does; at a guide's site the draw may be put off."""
        use = self.site_use
        if use is None or sample_shape or self.batch_shape:
            return self.rsample(sample_shape)
        if use.waits_now or (self.has_factored_draws and weights_wait_now()):
            return LazyWeight(self, use)
        return self.rsample()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of weights, in nats, with shape ``(*sample, *batch_shape)``."""
        if self._validate_args:
            self._validate_sample(value)
        constant = self.event_shape.numel() * math.log(2 * math.pi)
        distance = self._mahalanobis(value - self.loc) + self.log_det_covariance
        log_density: Tensor = -0.5 * (distance + constant)
        return log_density

    def entropy(self) -> Tensor:
        """Return the differential entropy ``(*batch_shape,)``, in nats."""
        constant = self.event_shape.numel() * (1 + math.log(2 * math.pi))
        nats: Tensor = 0.5 * (self.log_det_covariance + constant)
        return nats

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return this distribution with a larger batch shape, sharing memory."""
        batch_shape = torch.Size(batch_shape)
        new: Self = self._get_checked_instance(type(self), _instance)
        for name in self._parameters:
            value = getattr(self, name)
            own = value.shape[len(self.batch_shape) :]
            setattr(new, name, value.expand(batch_shape + own))
        new._set_shapes(batch_shape, self.event_shape, self._validate_args)
        new.site_use = self.site_use
        return new

    @property
    def _first_parameter(self) -> Tensor:
        """A tensor of this distribution's dtype and device, at hand without any computation."""
        parameter: Tensor = getattr(self, self._parameters[0])
        return parameter

    def _map_for_batch(self, linear_map: LinearMap) -> LinearMap:
        """Return the map for a batch of weights: what lies in between meets several, not one."""
        if self.batch_shape and isinstance(linear_map, DenseMap):
            return DenseMap(positions=False)
        return linear_map

    def _matrix(self, tensor: Tensor) -> Tensor:
        """View ``(*batch_shape, *event_shape)`` as ``(*batch_shape, out, in)``."""
        return tensor.reshape(*self.batch_shape, self.event_shape[0], -1)

    def _event_sum(self, tensor: Tensor) -> Tensor:
        return event_sum(tensor, len(self.event_shape))


def event_sum(tensor: Tensor, event_dim: int) -> Tensor:
    """Sum over the last dimensions; a scalar event has none, and torch would then sum all."""
    return tensor.sum(tuple(range(-event_dim, 0))) if event_dim else tensor


def shrink(tensor: Tensor, event_dim: int) -> Tensor:
    """Return ``(*batch, *event)`` with every event dimension that repeats one entry at size 1.

    What :meth:`torch.Tensor.expand` made large is small again; a tensor of one number in memory has
    an event of size 1.
    """
    index: Any = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    return tensor[(..., *index[tensor.dim() - event_dim :])]
