"""Priors over the weights of a net: by standard deviation, by fan-in, by name, or any distribution."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from pyro_structvi._checks import (
    NO_CLASS,
    Positive,
    brief,
    check,
    check_broadcastable,
    check_fields,
    check_positive,
    check_positive_number,
)
from pyro_structvi._patterns import matches
from pyro_structvi._pyro import declared_samples
from pyro_structvi.distributions.medians import median, unwrapped


@dataclass(frozen=True)
class FanIn:
    """Independent normals whose standard deviation shrinks with the inputs of a unit.

    A weight ``(out, *rest)`` gets the standard deviation ``scale / sqrt(prod(rest))``, so that
    outputs have the same prior variance whatever the width; a vector gets ``vector_scale``.

    Args:
        scale: The numerator for weights; sqrt(2) keeps variances through ReLU layers.
        vector_scale: The standard deviation of biases and other vectors.

    Raises:
        ValueError: If a scale is not a positive number.

    Example:
        >>> FanIn(scale=2.0).standard_deviation(torch.zeros(3, 16))
        0.5
    """

    scale: Positive = 1.0
    vector_scale: Positive = 1.0

    def __post_init__(self) -> None:
        """Check the scales."""
        check_fields(self)

    def standard_deviation(self, parameter: Tensor) -> float:
        """Return the standard deviation of each element of a parameter."""
        check("parameter", parameter, Tensor)
        if parameter.dim() < 2:
            return self.vector_scale
        return self.scale / math.sqrt(parameter[0].numel())


@dataclass(frozen=True)
class HierarchicalScale:
    r"""Independent normals whose standard deviation is a separate latent site.

    .. math:: s \sim p(s), \qquad w \mid s \sim N(0, s^2)

    A parameter ``weight`` gets the site ``weight_scale`` beside its own, so that each layer learns from
    the data how large its weights are. The KL of the weight given a draw of the scale has a closed
    form; the KL of the scale has one if its prior is a log-normal, as a guide's posterior of it is.

    Not for point estimates of both: where the prior of the scale does not vanish at zero, as a
    half-Cauchy does not, their density grows without bound as weights and scale go to zero together.

    Args:
        prior: The distribution of the scale, over positive numbers. With batch dimensions it is one of
            several scales, which broadcast to the parameter: ``(out, 1)`` for one scale for each unit.
        fan_in: Whether the scale of a weight ``(out, *rest)`` is divided by ``sqrt(prod(rest))``, as in
            :class:`FanIn`.

    Raises:
        TypeError: If ``prior`` is not a distribution.
        ValueError: If it is not over positive numbers.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> prior = HierarchicalScale(dist.HalfCauchy(1.0))
        >>> net = bayesianize(torch.nn.Linear(4, 3), prior={"weight": prior, "bias": 1.0})
        >>> MeanFieldGuide(Classifier(net, num_data=10)).site_names
        ['net.weight_scale', 'net.weight', 'net.bias']

    References:
        Neal (1996), "Bayesian learning for neural networks".
    """

    prior: Any
    fan_in: bool = False

    def __post_init__(self) -> None:
        """Check the prior."""
        check_fields(self)
        if not isinstance(self.prior, torch.distributions.Distribution):
            raise TypeError(
                "`prior` must be a distribution over positive numbers, such as "
                f"`dist.HalfCauchy(1.0)`, but got {brief(self.prior)}."
            )
        support = unwrapped(self.prior).support
        lower = torch.as_tensor(getattr(support, "lower_bound", -math.inf))
        if support.is_discrete or not bool((lower >= 0).all()):
            raise ValueError(
                "`prior` must be a distribution over positive numbers, such as "
                f"`dist.HalfCauchy(1.0)`, but got {brief(self.prior)} over {self.prior.support}."
            )


Prior = (
    float
    | Tensor
    | FanIn
    | HierarchicalScale
    | torch.distributions.Distribution
    | Annotated[Callable[[str, Tensor], Any], NO_CLASS]
    | Mapping[str, Any]
)


def resolve_prior(prior: Any, name: str, parameter: Tensor) -> Any:
    """Return the distribution of single elements that a prior means for one parameter.

    Args:
        prior: A standard deviation (a number, or a tensor that broadcasts to the parameter), a
            :class:`FanIn`, a :class:`HierarchicalScale`, a distribution, a function of name and
            parameter that returns one of these, or a mapping from name patterns to these, of which
            the first match wins.
        name: The parameter's name.
        parameter: The parameter.

    Returns:
        A distribution that broadcasts to the parameter's shape, with its dtype and device; or a
        :class:`HierarchicalScale` with such a distribution.

    Raises:
        ValueError: If a standard deviation is not positive or does not fit, or no pattern matches.
        TypeError: If the prior has another type.

    Example:
        >>> resolve_prior({"*.bias": 1.0, "*": FanIn()}, "0.weight", torch.zeros(3, 16)).scale
        tensor(0.2500)
    """
    label = f"prior for {name}"
    if isinstance(prior, Mapping):
        for pattern, entry in prior.items():
            if matches(name, pattern):
                return resolve_prior(entry, name, parameter)
        raise ValueError(
            f"No pattern of the prior {list(prior)} matches the parameter '{name}'. Add one, for "
            "instance {'*': 1.0} as the last."
        )
    if isinstance(prior, FanIn):
        return resolve_prior(prior.standard_deviation(parameter), name, parameter)
    if isinstance(prior, HierarchicalScale):
        return replace(prior, prior=_element_distribution(prior.prior, f"{name}_scale", parameter))
    if isinstance(prior, torch.distributions.Distribution):
        return _element_distribution(prior, name, parameter)
    if isinstance(prior, Tensor):
        scale = prior.detach().to(parameter)
        check_broadcastable(label, scale, parameter.shape, f"the shape of '{name}'")
        check_positive(label, scale)
        return dist.Normal(torch.zeros_like(scale), scale)
    if callable(prior):
        return resolve_prior(prior(name, parameter), name, parameter)
    if not isinstance(prior, (int, float)) or isinstance(prior, bool):
        raise TypeError(
            f"`{label}` must be a standard deviation, a FanIn, a HierarchicalScale, a "
            f"distribution, a function or a mapping, but got {brief(prior)}."
        )
    scale = torch.full((), check_positive_number(label, prior), dtype=parameter.dtype)
    return resolve_prior(scale, name, parameter)


def _element_distribution(prior: Any, name: str, parameter: Tensor) -> Any:
    prior = unwrapped(prior)
    try:
        is_pyros = isinstance(prior, TorchDistributionMixin)
        kind = type(prior) if is_pyros else getattr(dist, type(prior).__name__)
        arguments = {
            key: getattr(prior, key).detach().to(parameter) for key in _argument_names(prior)
        }
        rebuilt = kind(**arguments)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"The prior for '{name}' must be a distribution that its tensor arguments define, such "
            f"as Normal, Laplace or StudentT, but got {prior!r}."
        ) from error
    for key, value in arguments.items():
        element = value[(..., *(0 for _ in range(prior.arg_constraints[key].event_dim)))]
        check_broadcastable(
            f"prior for {name}: {key}", element, parameter.shape, f"that of '{name}'"
        )
    return rebuilt


def _argument_names(prior: Any) -> list[str]:
    return [key for key in prior.arg_constraints if key not in ("logits", "covariance_matrix")]


class BufferedPrior:
    """A prior whose arguments are buffers of its module, so that they move and convert with it.

    Made by :func:`sample_from`; called by Pyro with the module to get the distribution.
    """

    def __init__(self, attribute: str, prior: Any, shape: torch.Size) -> None:
        self.kind = type(prior)
        self.buffers = {key: f"{attribute}_prior_{key}" for key in _argument_names(prior)}
        self.shape = shape
        self._built: tuple[list[Tensor], Any] | None = None

    def __call__(self, module: PyroModule) -> Any:
        """Return the prior; built anew only where a buffer was replaced."""
        arguments: list[Tensor] = [module.get_buffer(buffer) for buffer in self.buffers.values()]
        if self._built is not None and all(
            old is new for old, new in zip(self._built[0], arguments, strict=True)
        ):
            return self._built[1]
        named = dict(zip(self.buffers, arguments, strict=True))
        prior = self.kind(**named, validate_args=False).expand(self.shape).to_event(len(self.shape))
        self._built = (arguments, prior)
        return prior

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the distribution, whose tensors belong to the module."""
        return {**self.__dict__, "_built": None}


class ScaledPrior:
    """A normal prior around zero, whose scale is another site of its module.

    Made by :func:`sample_from`; called by Pyro with the module to get the distribution.
    """

    def __init__(
        self, scale: str, factor: float, scale_shape: torch.Size, shape: torch.Size
    ) -> None:
        self.scale = scale
        self.factor = factor
        self.scale_shape = scale_shape
        self.shape = shape

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


def sample_from(module: PyroModule, attribute: str, prior: Any, shape: torch.Size) -> None:
    """Turn an attribute of a module into a sample site.

    Args:
        module: The module.
        attribute: The attribute's name; a parameter of that name is replaced.
        prior: The distribution of single elements, which broadcasts to ``shape``; or a
            :class:`HierarchicalScale` with such a distribution.
        shape: The shape of a value.

    Raises:
        ValueError: If the module has already an attribute of the name of the scale's site.
    """
    if isinstance(prior, HierarchicalScale):
        scale = f"{attribute}_scale"
        if hasattr(module, scale):
            raise ValueError(
                f"The prior of `{attribute}` must not be a HierarchicalScale, since its module "
                f"{type(module).__name__} has already an attribute `{scale}`, the name of the scale's "
                f"site. Give `{attribute}` another prior, by a mapping from patterns of names."
            )
        sample_from(module, scale, prior.prior, prior.prior.batch_shape)
        factor = 1 / math.sqrt(shape[1:].numel()) if prior.fan_in else 1.0
        own = ScaledPrior(scale, factor, prior.prior.batch_shape, shape)
        setattr(module, attribute, PyroSample(own))
        return
    buffered = BufferedPrior(attribute, prior, shape)
    for key, buffer in buffered.buffers.items():
        module.register_buffer(buffer, getattr(prior, key).detach().clone())
    setattr(module, attribute, PyroSample(buffered))
