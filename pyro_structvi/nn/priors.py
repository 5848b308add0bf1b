"""Priors of weights, and their sample sites."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from numbers import Number, Real
from typing import Annotated, Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from pyro_structvi._checks import (
    NO_CLASS,
    CheckedFields,
    NonNegative,
    Positive,
    Rule,
    brief,
    check,
    check_broadcastable,
    check_positive,
)
from pyro_structvi._pyro import conditioned_values, declared_samples, inside_plate, site_name
from pyro_structvi._torch import count_of_writes, is_recording
from pyro_structvi.weights.torch_distributions import (
    base_of,
    is_positive,
    map_tensors,
    median,
    skip_validation,
    tensors_of,
)


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern equals a name, or matches it with shell-style wildcards."""
    return name == pattern or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class FanIn(CheckedFields):
    """Independent normals with a standard deviation scaled by the fan-in.

    A weight has the standard deviation ``scale / sqrt(fan_in)``, so that the prior variance of outputs
    does not depend on the width; a vector has ``vector_scale``. The fan-in, the number of terms in an
    output, is ``prod(rest)`` for a weight ``(out, *rest)`` of a dense layer or a convolution,
    ``in / groups`` times the taps that reach an output for a transposed convolution, 1 for an embedding,
    and ``in`` for the weight ``(in, out)`` of a ``Conv1D``.

    Args:
        scale: The numerator for weights; sqrt(2) keeps variances through ReLU layers.
        vector_scale: The standard deviation of biases and other vectors.
        fan_in: The fan-in of all weights with this prior, if the module does not define it, as for
            stacked weights of experts: ``{"*.experts": FanIn(fan_in=64), "*": FanIn()}``.

    Raises:
        ValueError: If a scale or ``fan_in`` is not positive.

    Example:
        >>> FanIn(scale=2.0).standard_deviation(torch.zeros(3, 16))
        0.5
    """

    scale: Positive = 1.0
    vector_scale: Positive = 1.0
    fan_in: Positive | None = None

    def standard_deviation(self, parameter: Tensor, fan_in: float | None = None) -> float:
        """Return the standard deviation of each element; ``fan_in`` is 0 for a vector."""
        check("parameter", parameter, Tensor)
        check("fan_in", fan_in, NonNegative | None)
        if self.fan_in is not None:
            fan_in = self.fan_in
        elif fan_in is None:
            fan_in = parameter.shape[1:].numel() if parameter.dim() >= 2 else 0
        return self.scale / math.sqrt(fan_in) if fan_in else self.vector_scale


PositiveDistribution = Annotated[
    torch.distributions.Distribution,
    Rule(
        "a distribution over positive numbers, such as `dist.HalfCauchy(1.0)` or "
        "`dist.LogNormal(loc, scale)`",
        is_positive,
    ),
]


@dataclass(frozen=True)
class HierarchicalScale(CheckedFields):
    r"""Independent normals whose standard deviation is a separate latent site.

    .. math:: s \sim p(s), \qquad w \mid s \sim N(0, s^2)

    A parameter ``weight`` has a second site ``weight_scale``, so that each layer learns the size of its
    weights. The KL of the weight given a draw of the scale has a closed form, and so has the KL of the
    scale if its prior is log-normal, like its posterior. Point estimates of both have an unbounded
    density unless the prior of the scale vanishes at zero, which a half-Cauchy does not.

    Args:
        prior: The distribution of the scale, over positive numbers. Its batch shape broadcasts to the
            parameter: ``(out, 1)`` for a scale for each unit.
        fan_in: Whether the scale of a weight is divided by the root of its fan-in, as in
            :class:`FanIn`; or the fan-in itself, if the module does not define it.

    Raises:
        TypeError: If ``prior`` is not a distribution over positive numbers.
        ValueError: If ``fan_in`` is not positive.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> prior = HierarchicalScale(dist.HalfCauchy(1.0))
        >>> net = bayesianize(torch.nn.Linear(4, 3), prior={"weight": prior, "bias": 1.0})
        >>> MeanFieldGuide(Classifier(net, num_data=10)).site_names
        ['net.weight_scale', 'net.weight', 'net.bias']

    References:
        Neal (1996), "Bayesian learning for neural networks".
    """

    prior: PositiveDistribution
    fan_in: bool | Positive = False


Prior = (
    float
    | Tensor
    | FanIn
    | HierarchicalScale
    | torch.distributions.Distribution
    | Annotated[Callable[[str, Tensor], Any], NO_CLASS]
    | Mapping[str, Any]
    | None
)


def leaves_out(prior: Prior, name: str) -> bool:
    """Whether a prior is None for a parameter, by its name."""
    while isinstance(prior, Mapping):
        pattern = next((pattern for pattern in prior if matches(name, pattern)), None)
        if pattern is None:
            return False
        prior = prior[pattern]
    return prior is None


def matching(pattern: str, names: Iterable[str], argument: str, kind: str) -> list[str]:
    """Return the names that a pattern of an argument matches; raise a ``ValueError`` for none."""
    names = list(names)
    found = [name for name in names if matches(name, pattern)]
    if not found:
        raise ValueError(
            f"The pattern '{pattern}' of `{argument}` matches none of the {kind} {names}."
        )
    return found


def check_patterns(prior: Prior, names: Iterable[str]) -> None:
    """Raise a ``ValueError`` if a pattern of a prior matches none of the names of parameters."""
    for pattern, own in prior.items() if isinstance(prior, Mapping) else ():
        check_patterns(own, matching(pattern, names, "prior", "parameters"))


def resolve_prior(prior: Any, name: str, parameter: Tensor, fan_in: float | None = None) -> Any:
    """Return the distribution of a parameter.

    Example:
        >>> resolve_prior({"*.bias": 1.0, "*": FanIn()}, "0.weight", torch.zeros(3, 16)).scale
        tensor(0.2500)
    """
    label = f"prior for {name}"
    if prior is None:
        return None
    if parameter.is_complex():
        raise ValueError(
            f"`{label}` must be None for a complex weight: `{{'{name}': None, '*': ...}}`. Or let the "
            "net keep real and imaginary parts, and call `torch.view_as_complex` on them."
        )
    if isinstance(prior, Mapping):
        for pattern in prior:
            if matches(name, pattern):
                return resolve_prior(prior[pattern], name, parameter, fan_in)
        raise ValueError(
            f"No pattern of the prior {list(prior)} matches the parameter '{name}'. Add one, for "
            "instance {'*': 1.0} as the last."
        )
    if isinstance(prior, FanIn):
        _check_fan_in(prior, name, parameter, fan_in)
        return resolve_prior(prior.standard_deviation(parameter, fan_in), name, parameter)
    if isinstance(prior, HierarchicalScale):
        own = _element_distribution(prior.prior, f"{name}_scale", parameter)
        if prior.fan_in is True:
            _check_fan_in(prior, name, parameter, fan_in)
            prior = replace(prior, fan_in=FanIn().standard_deviation(parameter, fan_in) ** -2)
        return replace(prior, prior=own)
    if isinstance(prior, torch.distributions.Distribution):
        if isinstance(base_of(prior), dist.Delta):
            raise ValueError(
                f"`{label}` must have a density, but got {brief(prior)}. To fix a parameter, give it "
                f"the values, set `requires_grad = False`, and write `{{'{name}': None, '*': ...}}`."
            )
        is_whole = len(base_of(prior).event_shape) > 0
        return (_whole_distribution if is_whole else _element_distribution)(prior, name, parameter)
    if isinstance(prior, Tensor):
        check_constant(label, prior)
        scale = prior.to(parameter)
        check_broadcastable(label, scale, parameter.shape, f"the shape of '{name}'")
        check_positive(label, scale)
        return dist.Normal(torch.zeros_like(scale), scale)
    if callable(prior):
        return resolve_prior(prior(name, parameter), name, parameter, fan_in)
    if isinstance(prior, bool) or not isinstance(prior, Real):
        raise TypeError(
            f"`{label}` must be a standard deviation, a FanIn, a HierarchicalScale, a "
            f"distribution, a function or a mapping, but got {brief(prior)}."
        )
    check(label, prior, Positive)
    return resolve_prior(torch.full((), float(prior), dtype=parameter.dtype), name, parameter)


def check_constant(label: str, value: Tensor) -> None:
    """Raise a ``ValueError`` for a tensor with a gradient, which a buffer does not pass on."""
    if value.requires_grad:
        raise ValueError(
            f"`{label}` must be constant, but got a tensor that requires a gradient, which would not be "
            "trained. Pass `tensor.detach()`; or give a scale a prior, to learn it: "
            "`HierarchicalScale(dist.HalfNormal(1.0))` for weights, `dist.HalfNormal(1.0)` for noise."
        )


def _check_fan_in(
    prior: FanIn | HierarchicalScale, name: str, parameter: Tensor, fan_in: float | None
) -> None:
    if fan_in is None and parameter.dim() > 2 and prior.fan_in in (None, True):
        kind = type(prior).__name__
        raise ValueError(
            f"The prior {kind} needs the fan-in of '{name}', the number of terms in an output, which "
            f"its shape {tuple(parameter.shape)} does not define. Pass it for this parameter, "
            f"`{{'{name}': {kind}(..., fan_in=...), '*': ...}}`, or a number as its prior."
        )


def _element_distribution(prior: Any, name: str, parameter: Tensor) -> Any:
    prior = base_of(prior)
    try:
        is_pyros = isinstance(prior, TorchDistributionMixin)
        kind = type(prior) if is_pyros else getattr(dist, type(prior).__name__)
        arguments = {key: getattr(prior, key).to(parameter) for key in argument_names(prior)}
        rebuilt = kind(**arguments)
        own = vars(rebuilt)
        for key, value in vars(prior).items():  # options, such as `coords` of `Stable`
            is_option = isinstance(value, (Number, str)) and key[0] != "_"
            if is_option and own.get(key, value) != value:
                raise TypeError
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"The prior for '{name}' must be a distribution that its tensor arguments define, such "
            f"as Normal, Laplace or StudentT, but got {prior!r}."
        ) from error
    for key, value in arguments.items():
        check_constant(f"prior for {name}: {key}", value)
        element = value[(..., *(0 for _ in range(prior.arg_constraints[key].event_dim)))]
        check_broadcastable(
            f"prior for {name}: {key}", element, parameter.shape, f"that of '{name}'"
        )
    return rebuilt


def _whole_distribution(prior: Any, name: str, parameter: Tensor) -> Any:
    if prior.batch_shape or prior.event_shape != parameter.shape:
        raise ValueError(
            f"The prior for '{name}' must be over single elements, or over all of them with the event "
            f"shape {tuple(parameter.shape)}, but got batch shape {tuple(prior.batch_shape)} and event "
            f"shape {tuple(prior.event_shape)}. Write `.to_event()`, or reshape its arguments; the "
            "posterior of a weight with its bias is no prior of one, so fit it with `join_bias=False`."
        )
    if not tensors_of(prior):
        raise TypeError(
            f"The prior for '{name}' must be a distribution that its own tensors define, such as "
            f"KTiedNormal or MultivariateNormal, but got {prior!r}."
        )
    own = map_tensors(prior, lambda tensor: tensor.detach().to(parameter))
    skip_validation(own)  # which `torch.func.vmap` does not support
    if not parameter.is_meta:  # whose operations raise the same error
        try:
            own.log_prob(parameter.detach())
        except NotImplementedError as error:
            raise ValueError(
                f"`prior for {name}` must have a density, but got a {type(prior).__name__}. Take the "
                "posterior of another guide, such as a MatrixNormalGuide."
            ) from error
    return own


def argument_names(prior: Any) -> list[str]:
    """Return the names of the tensor arguments that define a distribution."""
    return [key for key in prior.arg_constraints if key not in ("logits", "covariance_matrix")]


class BufferedPrior:
    """A prior whose tensors are buffers of its module; Pyro calls it with the module.

    A prior of single elements has buffers named after its arguments. A prior over all elements together,
    such as the posterior of earlier data, numbers them in the order of the distribution's attributes.
    """

    def __init__(self, module: PyroModule, attribute: str, prior: Any, shape: torch.Size) -> None:
        is_whole = len(prior.event_shape) > 0
        tensors: dict[Any, Tensor] = (
            dict(enumerate(tensors_of(prior)))
            if is_whole
            else {key: getattr(prior, key) for key in argument_names(prior)}
        )
        self.buffers = {str(key): f"{attribute}_prior_{key}" for key in tensors}
        for key, value in tensors.items():
            module.register_buffer(f"{attribute}_prior_{key}", value.detach().clone())
        self.kind = type(prior)
        self.template = map_tensors(prior, lambda tensor: tensor.to("meta")) if is_whole else None
        self.shape = shape
        self._built: tuple[list[tuple[Tensor, float]], Any] | None = None

    def __call__(self, module: PyroModule) -> Any:
        """Return the prior, built again only after a buffer was replaced or written to.

        A distribution may hold tensors that it computed from its arguments.
        """
        values: list[Tensor] = [module.get_buffer(buffer) for buffer in self.buffers.values()]
        present = [(value, count_of_writes(value)) for value in values]
        if is_recording():  # a replay computes from the buffers
            return self._build(values)
        if self._built is None or any(
            old is not new or before != now
            for (old, before), (new, now) in zip(self._built[0], present, strict=True)
        ):
            self._built = present, self._build(values)
        return self._built[1]

    def _build(self, values: list[Tensor]) -> Any:
        if self.template is not None:
            following = iter(values)
            return map_tensors(self.template, lambda _: next(following))
        arguments = dict(zip(self.buffers, values, strict=True))
        prior = self.kind(**arguments, validate_args=False).expand(self.shape)
        return prior.to_event(len(self.shape))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the distribution, whose tensors belong to the module."""
        return {**self.__dict__, "_built": None}


class ScaledPrior:
    """A normal prior around zero whose scale is another site of its module."""

    def __init__(
        self, scale: str, factor: float, scale_shape: torch.Size, shape: torch.Size
    ) -> None:
        self.scale, self.factor = scale, factor
        self.scale_shape, self.shape = scale_shape, shape

    def __call__(self, module: PyroModule) -> Any:
        """Return the prior given the module's scale."""
        return self._given(getattr(module, self.scale))

    def at_median(self, module: PyroModule) -> Any:
        """Return the prior given a scale near the median of the scale's prior."""
        prior = declared_samples(module)[self.scale](module)
        return self._given(median(prior))

    def _given(self, scale: Tensor) -> Any:
        plates = scale.shape[: scale.dim() - len(self.scale_shape)]
        ones = [1 for _ in range(len(self.shape) - len(self.scale_shape))]
        scale = self.factor * scale.reshape(*plates, *ones, *self.scale_shape)
        normal = dist.Normal(scale.new_zeros(()), scale, validate_args=False)
        return normal.expand(plates + self.shape).to_event(len(self.shape))


class TiedPrior:
    """The prior of a site that another module owns, at the owner's ``attribute``."""

    def __init__(self, owner: PyroModule, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute

    def __call__(self, module: PyroModule) -> Any:
        """Return the owner's prior."""
        return declared_samples(self.owner)[self.attribute](self.owner)


def drop_plates(module: Any, values: dict[str, Tensor]) -> None:
    """Give conditioned values of the declared sites of a module their shapes, if no plate is around.

    ``Predictive`` gives values that a guide drew in plates of its own, with a 1 for each.
    """
    if not conditioned_values() or inside_plate():
        return
    for part in module.modules():
        for attribute, prior in declared_samples(part).items():
            name = site_name(part, attribute)
            if isinstance(prior, BufferedPrior | ScaledPrior) and name in values:
                value, shape = values[name], prior.shape
                is_value = isinstance(value, Tensor)  # and not one that `torch.fx` stands in for
                if is_value and value.shape != shape and value.numel() == shape.numel():
                    values[name] = value.reshape(shape)


def sample_from(module: PyroModule, attribute: str, prior: Any, shape: torch.Size) -> None:
    """Turn an attribute of a module into a sample site, in place of a parameter."""
    if isinstance(prior, HierarchicalScale):
        scale = f"{attribute}_scale"
        if hasattr(module, scale):
            raise ValueError(
                f"The prior of `{attribute}` must not be a HierarchicalScale, since its module "
                f"{type(module).__name__} has already an attribute `{scale}`, the name of the scale's "
                f"site. Give `{attribute}` another prior, by a mapping from patterns of names."
            )
        sample_from(module, scale, prior.prior, prior.prior.batch_shape)
        factor = 1 / math.sqrt(prior.fan_in or 1)
        own = ScaledPrior(scale, factor, prior.prior.batch_shape, shape)
        setattr(module, attribute, PyroSample(own))
        return
    setattr(module, attribute, PyroSample(BufferedPrior(module, attribute, prior, shape)))
