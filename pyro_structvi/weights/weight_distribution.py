"""The contract: what every distribution over a weight must define, may define, and obeys."""

from typing import Any, ClassVar, Literal, Self

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import check, checked, validates
from pyro_structvi.linalg.matrices import event_sum
from pyro_structvi.maps.dense import DenseMap
from pyro_structvi.maps.linear_map import FactoredDraw, LinearMap
from pyro_structvi.maps.readings import Arrangement
from pyro_structvi.weights import arguments
from pyro_structvi.weights.arguments import check_required_members
from pyro_structvi.weights.outputs import grouped_variance

Way = Literal["outputs", "factors", "weight"]


class WeightDistribution(TorchDistribution):
    r"""A random weight :math:`W` that knows the distribution of :math:`W x`.

    The event shape is the weight's own, ``(out, *rest)``, seen as a matrix ``(out, in)`` with
    ``in = prod(rest)``; a vector ``(out,)`` is the matrix ``(out, 1)``. Batch dimensions come in
    front. All covariances are over the row-major ``vec(W)``, of length ``D = out * in``.

    A subclass that is a normal distribution derives from :class:`GaussianWeight`, which asks for less.

    **Required**, or the definition of the class raises a ``TypeError``: ``arg_constraints``, by
    the names of its tensor arguments, each with batch dimensions in front, or annotations that have an
    :class:`Argument` for each but ``loc``, which are then checked; ``variance``;
    ``covariance_matrix``; ``rsample``; ``image_under``.

    **Optional**: ``has_independent_elements``, True if the covariance is diagonal;
    ``has_convolution_image``, False if a convolution is to draw the weight;
    ``has_exact_positions``, True if images are exact over the positions of an example;
    ``takes_bias_column``, True if a joined bias is better kept as a column than met by an input of one;
    ``applies_in_factors``, True if ``ways_to_apply`` may have ``"factors"``;
    ``loc``, ``variance_sum``, ``ways_to_apply``, ``draw_factored``, ``split_noise``, ``rows``,
    ``rearranged``, ``image_variance``, ``spread``, ``factorize``, ``expand``, as their docstrings say;
    ``log_prob`` and ``entropy``.

    **Provided**: ``argument_names``, ``mean``, ``image``, ``as_matrix``, ``as_weight``,
    ``map_for_batch``, ``support``.

    A subclass obeys these rules, and is tested for each:

    1. ``rsample`` has ``mean`` and ``covariance_matrix``.
    2. ``log_prob`` and ``entropy`` are those of the dense multivariate normal.
    3. ``kl_divergence(q, p)`` is the dense one, for every independent normal ``p``.
    4. ``image(x)`` has the mean and covariance of ``W x``, and ``spread`` is that for a random ``x``.
    5. Gradients equal those of the dense computation.
    6. ``expand`` and batches commute with all of these.

    Attributes:
        loc: The mean, ``(*batch_shape, *event_shape)``.
    """

    has_rsample = True
    has_independent_elements: ClassVar[bool] = False
    has_convolution_image: ClassVar[bool] = True
    has_exact_positions: ClassVar[bool] = False
    takes_bias_column: ClassVar[bool] = False
    applies_in_factors: ClassVar[bool] = False
    _arguments: ClassVar[dict[str, arguments.Argument]] = {}
    _required: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("arg_constraints", "variance", "covariance_matrix"), ()),
        **dict.fromkeys(("rsample", "image_under"), ()),
    }
    loc: Tensor

    def __init_subclass__(cls, abstract: bool = False, **options: Any) -> None:
        """Read the arguments of a class; check that it defines what it must, unless it is abstract."""
        super().__init_subclass__(**options)
        if found := arguments.declared(cls):
            cls._arguments = found
            named = {name: argument.constraint for name, argument in found.items()}
            cls.arg_constraints = {"loc": constraints.real, **named}
        if not abstract:
            contract = tuple(base for base in cls.__mro__ if "_required" in vars(base))
            check_required_members(cls, contract, cls._required)

    def __init__(
        self,
        parameters: dict[str, Tensor],
        event_dim: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args is not False:  # as in a training step
            check("validate_args", validate_args, bool | None)
        if event_dim is None:
            event_dim = arguments.event_dim_of(parameters, self._arguments)
        for name, value in parameters.items():
            setattr(self, name, value)
        if validates(validate_args):
            arguments.check_parameters(self, parameters, event_dim)
        split = self.loc.dim() - event_dim
        self._set_shapes(self.loc.shape[:split], self.loc.shape[split:], validate_args)
        if self._validate_args and self._arguments:
            arguments.check_declared(self, self._arguments)

    def _set_shapes(
        self, batch_shape: torch.Size, event_shape: torch.Size, validate_args: bool | None
    ) -> None:
        super().__init__(batch_shape, event_shape, validate_args=False)
        self._validate_args = validates(validate_args)
        self._with_grad = torch.is_grad_enabled()  # for what is formed once

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """Every real tensor of the event shape."""
        return constraints.independent(constraints.real, len(self.event_shape))

    # ---- required --------------------------------------------------------------------------------

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)`` of the row-major weight; for small sizes."""
        raise NotImplementedError

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw weights ``(*sample_shape, *batch_shape, *event_shape)``, differentiably."""
        raise NotImplementedError

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> TorchDistribution:
        """Return the distribution of ``linear_map(x, W) + bias``, independent over examples.

        Called only where :meth:`ways_to_apply` has ``"outputs"``.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            bias: None, a tensor ``(out,)``, or the distribution of one with independent elements,
                independent of ``W`` too.

        Returns:
            A distribution over all outputs of the map. Each output has its exact distribution; over the
            positions of one example, correlations from independent elements are dropped.
        """
        raise NotImplementedError

    # ---- optional --------------------------------------------------------------------------------

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, ``(*batch_shape,)``."""
        return self._event_sum(self.variance)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Return how a linear map may get this weight, the cheapest way first.

        ``"outputs"`` draws the outputs from :meth:`image_under`, ``"factors"`` draws the weight once and
        applies it in factors, by :meth:`draw_factored`, ``"weight"`` draws it once and forms it. The
        objective takes the first way that it allows; ``"weight"`` is always allowed.
        """
        return ("outputs", "weight") if self._has_image(linear_map) else ("weight",)

    def _has_image(self, linear_map: LinearMap) -> bool:
        return linear_map.is_dense or self.has_convolution_image

    def draw_factored(self) -> FactoredDraw:
        """Draw a weight that is not formed, where :meth:`ways_to_apply` has ``"factors"``."""
        raise NotImplementedError

    def rows(self, index: Tensor) -> TorchDistribution | None:
        """Return the distribution of rows of one matrix ``W (num, dim)``, independent over examples.

        Args:
            index: Which rows, integers ``(batch, positions)``.

        Returns:
            A distribution over ``W[index]`` with the event ``(positions, dim)``, or None, and the weight
            is then drawn. Over the positions of one example the noise of independent rows is
            independent, also where an index repeats. Noise that rows share is one draw for an example.
        """
        arguments.check_index(self, index)
        return None

    @checked
    def rearranged(self, arrangement: Arrangement) -> "WeightDistribution | None":
        """Return the distribution of the weight in another order, or None: the weight is then drawn.

        A stack of weights becomes batch dimensions.
        """
        return None

    def image_variance(self, linear_map: LinearMap, x: Tensor, mean: Tensor) -> Tensor:
        """Return the variance of each output of ``linear_map(x, W)``, also where no outputs are drawn.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            mean: The mean of the outputs.
        """
        has_image = self._has_image(linear_map)
        if linear_map.groups > 1:
            has_image = "outputs" in self.ways_to_apply(linear_map, x)
        if not has_image:
            return grouped_variance(self.as_matrix(self.loc), self.covariance_matrix, linear_map, x)
        return self._image_variance(linear_map, x, mean)

    def _image_variance(self, linear_map: LinearMap, x: Tensor, mean: Tensor) -> Tensor:
        variance: Tensor = self.image_under(linear_map, x).variance
        return variance

    def spread(self, moment: Tensor) -> Tensor:
        r"""Return :math:`E[(W - M) S (W - M)^\top]`, the covariance of outputs that the weight makes.

        For a random input that is independent of the weight, ``S`` is its second moment :math:`E[x
        x^\top]`. Without a rule of a structure's own the dense covariance is formed.

        Args:
            moment: Symmetric matrices ``S (*batch, in, in)``.

        Returns:
            Matrices ``(*batch, out, out)``.
        """
        out = self.event_shape[0]
        size = moment.shape[-1]
        covariance = self.covariance_matrix.reshape(out, size, out, size)
        outputs: Tensor = torch.einsum("iajb,...ab->...ij", covariance, moment)
        return outputs

    def split_noise(
        self, sample_shape: torch.Size
    ) -> "tuple[WeightDistribution | None, Tensor | None]":
        """Split ``W`` into a part with independent elements, and draws of the remainder.

        Returns the distribution of the first part and draws ``(*sample_shape, *batch_shape,
        *event_shape)`` of the second, None if that part is absent; their sum has this distribution.
        """
        if self.has_independent_elements:
            return self, None
        return None, self.rsample(sample_shape)

    def factorize(self) -> None:
        """Compute the factors that draws and densities need ahead of their first use."""

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return this distribution with a larger batch shape, sharing memory."""
        batch_shape = arguments.as_expanded(batch_shape, self.batch_shape)
        new: Self = self._get_checked_instance(type(self), _instance)
        for name in self.argument_names:
            value = getattr(self, name)
            own = value.shape[len(self.batch_shape) :]
            setattr(new, name, value.expand(batch_shape + own))
        new._set_shapes(batch_shape, self.event_shape, self._validate_args)
        return new

    # ---- provided --------------------------------------------------------------------------------

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of the tensor arguments, each with batch dimensions in front."""
        return tuple(self.arg_constraints)

    @property
    def mean(self) -> Tensor:
        """The mean, ``(*batch_shape, *event_shape)``."""
        return self.loc

    def image(self, x: Tensor) -> TorchDistribution:
        """Return the distribution of ``W x``, independently for every ``x (*batch, in)``.

        Raises:
            ValueError: If the last dimension of ``x``, its dtype or device do not fit the weight.
        """
        arguments.check_input(self, x)
        return self.image_under(DenseMap(positions=False), x)

    def as_matrix(self, weight: Tensor) -> Tensor:
        """View ``(*sample_shape, *batch_shape, *event_shape)`` as ``(..., out, in)``."""
        lead = weight.shape[: weight.dim() - len(self.event_shape)]
        return weight.reshape(*lead, self.event_shape[0], -1)

    def as_weight(self, matrix: Tensor) -> Tensor:
        """View ``(*sample_shape, *batch_shape, out, in)`` as ``(..., *event_shape)``."""
        return matrix.reshape(*matrix.shape[:-2], *self.event_shape)

    def map_for_batch(self, linear_map: LinearMap) -> LinearMap:
        """Return the map for a batch of weights, for which no input has positions."""
        return linear_map.without_positions() if self.batch_shape else linear_map

    def _validate_sample(self, value: Tensor) -> None:
        name, shapes = self.argument_names[0], (self.batch_shape, self.event_shape)
        arguments.check_value(value, name, self._first_parameter, *shapes)

    @property
    def _first_parameter(self) -> Tensor:
        """A tensor of this distribution's dtype and device."""
        parameter: Tensor = getattr(self, self.argument_names[0])
        return parameter

    def _event_sum(self, tensor: Tensor) -> Tensor:
        return event_sum(tensor, len(self.event_shape))
