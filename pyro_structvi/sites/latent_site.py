"""Descriptions of latent sites for families."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.distributions.transforms import ExpTransform
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_structvi.weights.torch_distributions import element_support

WIDE = 50  # a fan-in above which steps of weights are shorter, also by depth


@dataclass(frozen=True)
class Plate:
    """A vectorized plate around a site."""

    name: str
    size: int  # without subsampling
    dim: int  # counted from the right
    subsample_size: int | None = None  # in one pass


@dataclass(frozen=True)
class JoinedBias:
    """The bias that is the last column of a weight."""

    name: str
    weight_shape: torch.Size  # without the bias, (out, *rest)
    prior_scale: float | None = None


@dataclass(frozen=True)
class LatentSite:
    """The description of a latent site; a weight joined with its bias is one, ``(out, in + 1)``.

    Attributes:
        name: The name in the model.
        shape: The shape of a value, with batch dimensions in front and without subsampling.
        event_dim: The number of trailing dimensions of one event in the model.
        support: The support.
        plates: The vectorized plates around the site.
        is_local: Whether a plate also holds observations: the model samples it for other examples.
        bias: The bias joined to this weight, or None.
        prior_scale: The standard deviation of the prior, the root mean square over elements; None if it
            is unknown or infinite.
        fan_in: The number of terms in each output of the module, 0 for a bias; None if unknown.
        input_dim: The dimension of the input channels in a weight; None if there is none or it is
            unknown.
        groups: The number of groups of input channels, as in a grouped convolution.
    """

    name: str
    shape: torch.Size
    event_dim: int
    support: Any
    plates: tuple[Plate, ...] = ()
    is_local: bool = False
    bias: JoinedBias | None = None
    prior_scale: float | None = None
    fan_in: float | None = None
    input_dim: int | None = 1
    groups: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model's sites, weight and bias for a joined site."""
        return tuple(self.shapes)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the model's sites, by name."""
        if self.bias is None:
            return {self.name: self.shape}
        return {self.name: self.bias.weight_shape, self.bias.name: self.shape[:1]}

    def join_bias(self, bias: "LatentSite") -> "LatentSite":
        """Return the site of this weight with a bias ``(out,)`` as its last column."""
        shape = torch.Size([self.shape[0], self.shape[1:].numel() + 1])
        joined = JoinedBias(bias.name, self.shape, bias.prior_scale)
        return replace(self, shape=shape, event_dim=2, bias=joined)

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """Return the values of the model's sites, by name."""
        if self.bias is None:
            return {self.name: value}
        weight, bias = value.split([value.shape[-1] - 1, 1], -1)
        # The gradient of strided rows would be transposed by torch, and copied slowly.
        weight = weight.contiguous().view(*value.shape[:-2], *self.bias.weight_shape)
        return {self.name: weight, self.bias.name: bias.squeeze(-1)}

    @property
    def unit(self) -> float:
        """The typical scale of an unconstrained value, which is the unit of steps in training.

        It is the standard deviation of the prior; 1 if that is unknown. For a weight it is at most
        ``2 / sqrt(fan_in)``, about the size of initial weights, and smaller by ``sqrt(50 / inputs)``
        with more than 50 inputs, or input channels of a convolution: Adam moves each weight by about
        the same amount, and moves may add up (Yang et al., 2021).
        """
        if not self.is_real or self.prior_scale is None:
            return 1.0
        if not self.fan_in:
            return self.prior_scale
        initial = 2 / math.sqrt(self.fan_in)
        weight = self.shape if self.bias is None else self.bias.weight_shape
        inputs = self.fan_in
        if len(weight) > 2 and self.input_dim is not None:
            inputs = min(inputs, weight[self.input_dim])
        return min(self.prior_scale, initial, initial * math.sqrt(WIDE / inputs))

    @property
    def is_wide(self) -> bool:
        """Whether the site is a weight with a fan-in above 50."""
        return self.is_real and (self.fan_in or 0) > WIDE

    @property
    def is_batch(self) -> bool:
        """Whether the site is a batch of independent events: in a plate, or without ``to_event``."""
        return self.event_dim < len(self.shape)

    @property
    def is_subsampled(self) -> bool:
        """Whether a plate around the site is subsampled."""
        return any(plate.subsample_size is not None for plate in self.plates)

    @property
    def is_real(self) -> bool:
        """Whether every real value is allowed."""
        return isinstance(element_support(self.support), type(constraints.real))


def bijection_onto(support: Any) -> Any:
    """Return the bijection onto a support, of single elements where these are independent.

    It is ``exp`` for positive numbers, as in a log-normal.
    """
    support = element_support(support)
    positive = isinstance(support, type(constraints.positive)) and support.lower_bound == 0
    return ExpTransform() if positive else biject_to(support)


def has_bijection(support: Any) -> bool:
    """Whether a support is continuous, with a bijection from the real numbers."""
    try:
        return not support.is_discrete and bijection_onto(support) is not None
    except NotImplementedError:
        return False


def bijection_at(name: str, support: Any) -> Any:
    """Return the bijection onto the support of a site, whose name is for the error.

    Raises:
        ValueError: If none is registered, as for a sphere.
    """
    try:
        return bijection_onto(support)
    except NotImplementedError as error:
        raise ValueError(
            f"The latent site '{name}' lies on {support}, onto which torch registers no bijection from "
            "the real numbers. Reparametrize it (for a sphere: `poutine.reparam(model, "
            f"config={{'{name}': ProjectedNormalReparam()}})`, from a ProjectedNormal), or hide it by "
            f"`poutine.block(model, hide=['{name}'])` and write a separate guide for it."
        ) from error
