"""From a prior to a sample site of a module, whose buffers hold what the prior is made of."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from pyro_structvi._pyro import declared_samples
from pyro_structvi.distributions.medians import median
from pyro_structvi.distributions.own_tensors import map_tensors, tensors_of
from pyro_structvi.nn.priors import HierarchicalScale, argument_names


class BufferedPrior:
    """A prior whose arguments are buffers of its module, so that they move and convert with it.

    Made by :func:`sample_from`; called by Pyro with the module to get the distribution.
    """

    def __init__(self, attribute: str, prior: Any, shape: torch.Size) -> None:
        self.kind = type(prior)
        self.buffers = {key: f"{attribute}_prior_{key}" for key in argument_names(prior)}
        self.shape = shape
        self._built: tuple[list[Tensor], Any] | None = None

    def values(self, prior: Any) -> dict[str, Tensor]:
        """Return what the buffers hold of a prior."""
        return {buffer: getattr(prior, key) for key, buffer in self.buffers.items()}

    def _build(self, arguments: list[Tensor]) -> Any:
        named = dict(zip(self.buffers, arguments, strict=True))
        prior = self.kind(**named, validate_args=False).expand(self.shape)
        return prior.to_event(len(self.shape))

    def __call__(self, module: PyroModule) -> Any:
        """Return the prior; built anew only where a buffer was replaced."""
        arguments: list[Tensor] = [module.get_buffer(buffer) for buffer in self.buffers.values()]
        if self._built is not None and all(
            old is new for old, new in zip(self._built[0], arguments, strict=True)
        ):
            return self._built[1]
        self._built = (arguments, self._build(arguments))
        return self._built[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the distribution, whose tensors belong to the module."""
        return {**self.__dict__, "_built": None}


class WholePrior(BufferedPrior):
    """One over all elements of a parameter together, such as the posterior of earlier data.

    Its tensors are buffers, in the order in which the distribution holds them.
    """

    def __init__(self, attribute: str, prior: Any) -> None:
        self.template = map_tensors(prior, lambda tensor: tensor.to("meta"))
        self.buffers = {
            str(number): f"{attribute}_prior_{number}" for number in range(len(tensors_of(prior)))
        }
        self._built = None

    def values(self, prior: Any) -> dict[str, Tensor]:
        """Return what the buffers hold of a prior."""
        return dict(zip(self.buffers.values(), tensors_of(prior), strict=True))

    def _build(self, arguments: list[Tensor]) -> Any:
        values = iter(arguments)
        return map_tensors(self.template, lambda _: next(values))


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
        prior: The distribution of single elements, which broadcasts to ``shape``, or one of all elements
            together; or a :class:`HierarchicalScale` with the former.
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
        factor = 1 / math.sqrt(prior.fan_in or 1)
        own = ScaledPrior(scale, factor, prior.prior.batch_shape, shape)
        setattr(module, attribute, PyroSample(own))
        return
    is_whole = len(prior.event_shape) > 0
    buffered = WholePrior(attribute, prior) if is_whole else BufferedPrior(attribute, prior, shape)
    for buffer, value in buffered.values(prior).items():
        module.register_buffer(buffer, value.detach().clone())
    setattr(module, attribute, PyroSample(buffered))
