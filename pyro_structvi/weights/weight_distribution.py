"""The contract of distributions over weights, and Gaussian ones."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import check, checked, validates
from pyro_structvi.linalg.matrices import autocast_off, autocasts, event_sum, standard_normal
from pyro_structvi.maps.calls import Arrangement
from pyro_structvi.maps.linear_map import DenseMap, FactoredDraw, LinearMap
from pyro_structvi.weights import arguments
from pyro_structvi.weights.outputs import NormalOutputs, dense_output_variance

Way = Literal["outputs", "factors", "weight"]
NO_OUTPUTS = "{} has no distribution of outputs. Define `{}`, or leave it out of `ways_to_apply`."


class TensorDistribution(TorchDistribution):
    """A real distribution of tensors ``(*batch_shape, ...)``, which ``arg_constraints`` names."""

    has_rsample = True
    batch_shape: torch.Size
    event_shape: torch.Size

    def _set_shapes(
        self, batch_shape: torch.Size, event_shape: torch.Size, validate_args: bool | None
    ) -> None:
        super().__init__(batch_shape, event_shape, validate_args=False)
        self._validate_args = validates(validate_args)
        self._with_grad = torch.is_grad_enabled()  # for cached properties

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        return constraints.independent(constraints.real, len(self.event_shape))

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(self.arg_constraints)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        batch_shape = arguments.as_expanded(batch_shape, self.batch_shape)
        batch_dim = len(self.batch_shape)

        def expanded(value: Tensor) -> Tensor:
            return value.expand(batch_shape + value.shape[batch_dim:])

        return self._changed(expanded, batch_shape, self.event_shape, _instance)

    def _changed(
        self,
        change: Callable[[Tensor], Tensor],
        batch_shape: torch.Size,
        event_shape: torch.Size,
        instance: Any = None,
    ) -> Self:
        """Return a distribution of this class with changed arguments, and without checks."""
        new: Self = self._get_checked_instance(type(self), instance)
        for name, value in vars(self).items():
            if isinstance(value, bool | int | float | str) and not name.startswith("_"):
                setattr(new, name, value)  # an option
        for name in self.argument_names:
            setattr(new, name, change(getattr(self, name)))
        new._set_shapes(batch_shape, event_shape, self._validate_args)
        return new

    def _validate_sample(self, value: Tensor) -> None:
        name, shapes = self.argument_names[0], (self.batch_shape, self.event_shape)
        arguments.check_value(value, name, self._first_parameter, *shapes)

    @property
    def _first_parameter(self) -> Tensor:
        return getattr(self, self.argument_names[0])


class WeightDistribution(TensorDistribution):
    """The distribution of a weight :math:`W`, with the distribution of :math:`W x`.

    The event shape ``(out, *rest)`` is seen as a matrix ``(out, in)`` with ``in = prod(rest)``; a
    vector ``(out,)`` is the matrix ``(out, 1)``. Batch dimensions come in front. All covariances are
    over the row-major ``vec(W)``, of length ``D = out * in``.

    **Required**: ``arg_constraints`` of the tensor arguments, or annotations with an :class:`Argument`
    for each of them but ``loc``; ``variance``; ``covariance_matrix``; ``rsample``; ``image_under``, or
    ``ways_to_apply`` without ``"outputs"``.

    **Optional**: ``has_exact_positions``, True if images are exact over the positions of an example;
    ``loc``, ``variance_sum``, ``ways_to_apply``, ``rows``, ``rearranged``, ``spread``, ``expand``;
    ``log_prob`` and ``entropy``.

    All members agree with the dense computation, gradients included, and commute with ``expand``.

    Attributes:
        loc: The mean, ``(*batch_shape, *event_shape)``.
    """

    has_exact_positions: ClassVar[bool] = False
    _arguments: ClassVar[dict[str, arguments.Argument]] = {}
    loc: Tensor

    def __init_subclass__(cls, **options: Any) -> None:
        """Read the annotated arguments."""
        super().__init_subclass__(**options)
        if found := arguments.declared(cls):
            cls._arguments = cls._arguments | found
            named = {name: argument.constraint for name, argument in cls._arguments.items()}
            cls.arg_constraints = {"loc": constraints.real, **named}

    def __init__(
        self,
        parameters: dict[str, Tensor],
        event_dim: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:  # as in a training step
            check("validate_args", validate_args, bool | None)
        if event_dim is None:
            if not self._arguments:
                raise ValueError(
                    "`event_dim` must be the number of dimensions of a weight, but "
                    f"{type(self).__name__} passes none and annotates no tensor by `Argument`. Pass it "
                    "to the base class, or annotate the tensors in place of `arg_constraints`."
                )
            name, argument = next(iter(self._arguments.items()))
            if validates(validate_args):
                arguments.check_event_dim(parameters, name, argument)
            event_dim = parameters["loc"].dim() - parameters[name].dim() + len(argument.letters)
        for name, value in parameters.items():
            setattr(self, name, value)
        if validates(validate_args):
            arguments.check_parameters(self, parameters, event_dim)
        split = self.loc.dim() - event_dim
        self._set_shapes(self.loc.shape[:split], self.loc.shape[split:], validate_args)
        if self._validate_args and self._arguments:
            arguments.check_declared(self, self._arguments)

    # ---- required --------------------------------------------------------------------------------

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The variance of each element, ``(*batch_shape, *event_shape)``."""

    @property
    @abstractmethod
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)`` of the row-major weight; for small sizes."""

    @abstractmethod
    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
    ) -> TorchDistribution:
        """Return the distribution of ``linear_map(x, W) + bias``, independent over examples.

        Called only where :meth:`ways_to_apply` has ``"outputs"``. The bias is ``(out,)``. The marginal
        of each output is exact; correlations between the positions of an example that stem from
        independent elements are dropped. A class without it overrides :meth:`ways_to_apply`, so that
        its weights are sampled.
        """
        raise NotImplementedError(NO_OUTPUTS.format(type(self).__name__, "image_under"))

    # ---- optional --------------------------------------------------------------------------------

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, ``(*batch_shape,)``."""
        return self._event_sum(self.variance)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Return the supported ways of applying the weight, the cheapest first.

        ``"outputs"`` samples the outputs from :meth:`image_under`, ``"weight"`` samples the weight,
        and ``"factors"``, of a :class:`FactoredWeight`, applies a sample without forming it. The
        objective takes the first way that it allows; it always allows ``"weight"``.
        """
        return "outputs", "weight"

    @checked
    def rows(self, index: Tensor) -> TorchDistribution | None:
        """Return the distribution of rows of one matrix ``W (num, dim)``, independent over examples.

        For ``index (batch, positions)`` its events are ``(positions, dim)``; None if the weight must
        be sampled. The noise of independent rows is independent over positions, also for a repeated
        index. Noise that rows share has one sample for each example.
        """
        return None

    @checked
    def rearranged(self, arrangement: Arrangement) -> "WeightDistribution | None":
        """Return the distribution with permuted dimensions, a stack as batch, or None."""
        return None

    def image_variance(self, linear_map: LinearMap, x: Tensor, mean: Tensor) -> Tensor:
        """Return the variance of each output of any map, around outputs with this mean."""
        if "outputs" not in self.ways_to_apply(linear_map, x):
            return dense_output_variance(self.event_shape[0], self.covariance_matrix, linear_map, x)
        return self.image_under(linear_map, x).variance

    def spread(self, moment: Tensor) -> Tensor:
        r"""Return :math:`E[(W - M) S (W - M)^\top]`, ``(*batch, out, out)``.

        It is the covariance of :math:`(W - M) x` for an independent input with the second moment
        :math:`S = E[x x^\top]`, ``(*batch, in, in)``.
        """
        out = self.event_shape[0]
        size = moment.shape[-1]
        covariance = self.covariance_matrix.reshape(out, size, out, size)
        return torch.einsum("iajb,...ab->...ij", covariance, moment)

    # ---- provided --------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        return self.loc

    def image(self, x: Tensor) -> TorchDistribution:
        """Return the distribution of ``W x``, independently for every ``x (*batch, in)``."""
        arguments.check_input(self, x)
        return self.image_under(DenseMap(positions=False), x)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """View ``(*sample_shape, *batch_shape, *event_shape)`` as ``(..., out, in)``."""
        lead = weight.shape[: weight.dim() - len(self.event_shape)]
        return weight.reshape(*lead, self.event_shape[0], self.event_shape[1:].numel())

    def as_weight(self, matrix: Tensor) -> Tensor:
        """View ``(*sample_shape, *batch_shape, out, in)`` as ``(..., *event_shape)``."""
        return matrix.reshape(*matrix.shape[:-2], *self.event_shape)

    def map_for_batch(self, linear_map: LinearMap) -> LinearMap:
        """Return the map without positions for a batch of weights, else the map itself."""
        return linear_map.without_positions() if self.batch_shape else linear_map

    def _event_sum(self, tensor: Tensor) -> Tensor:
        return event_sum(tensor, len(self.event_shape))


class FactoredWeight(WeightDistribution):
    """A weight, also with a bias column, whose samples are applied as a product of factors."""

    @abstractmethod
    def draw_factored(self) -> FactoredDraw:
        """Sample a weight in factors."""

    @abstractmethod
    def factorize(self) -> None:
        """Compute the factors that samples and densities share."""


def noise_columns(q: "GaussianWeight") -> Tensor:
    """Return the columns of ``A``, ``(noise, *batch_shape, *event_shape)``; for small sizes."""
    size, like = q.noise_shape.numel(), q._first_parameter
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    noise = unit.reshape(size, *(1 for _ in q.batch_shape), *q.noise_shape)
    return q.scale_noise(noise.expand(size, *q.batch_shape, *q.noise_shape))


class GaussianWeight(WeightDistribution):
    r"""A weight :math:`W = \mu + A e` with standard normal noise :math:`e`.

    **Required**: ``arg_constraints`` with ``"loc"`` first, or annotations; ``scale_noise``, :math:`A e`;
    ``whiten``, :math:`A^{-1} d`, or ``mahalanobis`` if A is not square; ``log_det_covariance``;
    ``output_variance``, the variances of independent outputs of a linear map, or ``image_around``, the
    distribution of correlated ones, or ``ways_to_apply`` without ``"outputs"``.

    **Optional**, in addition to :class:`WeightDistribution`: ``noise_shape``, by default the event
    shape; ``variance``, by default the diagonal of the dense covariance.
    """

    # ---- required --------------------------------------------------------------------------------

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Return ``A e (..., *event_shape)`` for ``e (*sample_shape, *batch_shape, *noise_shape)``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no `scale_noise`. Define it, for A e of `loc` + A e."
        )

    def whiten(self, difference: Tensor) -> Tensor:
        """Return the noise ``A^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no `whiten`. Define it, for A^-1 d of a difference d "
            "from `loc`, or define `mahalanobis`."
        )

    @property
    @abstractmethod
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        """Return the variances of ``linear_map(x, W)``, if its outputs are independent."""
        raise NotImplementedError(NO_OUTPUTS.format(type(self).__name__, "output_variance"))

    # ---- optional --------------------------------------------------------------------------------

    @property
    def noise_shape(self) -> torch.Size:
        """The shape of the noise ``e`` of one weight."""
        return self.event_shape

    @property
    def variance(self) -> Tensor:
        diagonal = self.covariance_matrix.diagonal(dim1=-2, dim2=-1)
        return diagonal.reshape(*self.batch_shape, *self.event_shape)

    def image_around(self, mean: Tensor, linear_map: LinearMap, x: Tensor) -> TorchDistribution:
        """Return the distribution of ``linear_map(x, W) + bias`` around its mean."""
        return NormalOutputs(linear_map, mean, self.output_variance(linear_map, x))

    # ---- provided --------------------------------------------------------------------------------

    mode = property(lambda self: self.mean, doc="The mode, which is the mean.")

    @property
    def covariance_matrix(self) -> Tensor:
        matrix = noise_columns(self).flatten(1 + len(self.batch_shape)).movedim(0, -1)
        return matrix @ matrix.mT

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        samples = arguments.as_size("sample_shape", sample_shape)
        shape = samples + self.batch_shape + self.noise_shape
        return self.loc + self.scale_noise(standard_normal(shape, self._first_parameter))

    def mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        return event_sum(self.whiten(difference).square(), len(self.noise_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        distance = self.mahalanobis(value - self.loc) + self.log_det_covariance
        return -0.5 * (distance + self.event_shape.numel() * math.log(2 * math.pi))

    def entropy(self) -> Tensor:
        """Return the differential entropy ``(*batch_shape,)``, in nats."""
        size = self.event_shape.numel()
        return 0.5 * (self.log_det_covariance + size * (1 + math.log(2 * math.pi)))

    def image_variance(self, linear_map: LinearMap, x: Tensor, mean: Tensor) -> Tensor:
        has_own_image = type(self).image_under is not GaussianWeight.image_under
        if has_own_image or "outputs" not in self.ways_to_apply(linear_map, x):
            return super().image_variance(linear_map, x, mean)
        around = self.image_around(mean, self.map_for_batch(linear_map), x)
        return around.variance

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
    ) -> TorchDistribution:
        linear_map = self.map_for_batch(linear_map)
        mean = linear_map(x, self.as_matrix(self.loc), bias)
        x = x.to(self.loc.dtype) if autocasts(x) else x
        with autocast_off(x):
            return self.image_around(mean, linear_map, x)


class IndependentWeight(GaussianWeight):
    """Independent normals with the standard deviations ``stddev``.

    **Required**: ``arg_constraints``; ``stddev``, of the weight's shape; ``output_variance``,
    ``image_around`` or ``ways_to_apply``. **Optional**: any member that is cheaper than by ``stddev``.
    """

    @property
    @abstractmethod
    def stddev(self) -> Tensor:
        """The standard deviation of each weight, ``(*batch_shape, *event_shape)``."""

    @property
    def variance(self) -> Tensor:
        return self.stddev.square()

    @property
    def covariance_matrix(self) -> Tensor:
        return torch.diag_embed(self.variance.reshape(*self.batch_shape, -1))

    @property
    def log_det_covariance(self) -> Tensor:
        return 2 * self._event_sum(self.stddev.log())

    def scale_noise(self, noise: Tensor) -> Tensor:
        return noise * self.stddev

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        samples = arguments.as_size("sample_shape", sample_shape)
        shape = samples + self.batch_shape + self.event_shape
        noise = standard_normal(shape, self._first_parameter)
        return torch.addcmul(self.loc, noise, self.stddev)  # one pass over memory

    def spread(self, moment: Tensor) -> Tensor:
        diagonal = moment.diagonal(dim1=-2, dim2=-1)
        return torch.diag_embed(diagonal @ self.as_matrix(self.variance).mT)

    def whiten(self, difference: Tensor) -> Tensor:
        return difference / self.stddev

    def _item(self, index: int) -> Self:
        return self._changed(lambda value: value[index], self.batch_shape[1:], self.event_shape)
