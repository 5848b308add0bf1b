"""What a family may know of a latent site."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.distributions.transforms import ExpTransform
from torch import Tensor
from torch.distributions import biject_to, constraints


@dataclass(frozen=True)
class Plate:
    """A vectorized plate around a site.

    Attributes:
        name: Its name.
        size: Its size, all examples of a plate that is subsampled.
        dim: The batch dimension that it takes, counted from the right.
        subsample_size: How many examples one pass has of a plate that is subsampled.
    """

    name: str
    size: int
    dim: int
    subsample_size: int | None = None


@dataclass(frozen=True)
class JoinedBias:
    """The bias that is a weight's last column.

    Attributes:
        name: The bias's site in the model.
        weight_shape: The weight's own shape there, ``(out, *rest)``.
        prior_scale: As for :class:`LatentSite`.
    """

    name: str
    weight_shape: torch.Size
    prior_scale: float | None = None


@dataclass(frozen=True)
class LatentSite:
    """What a family may know of a latent site. It holds no data and no distribution.

    A weight that is joined with its bias is one site here, ``(out, in + 1)``, and two in the model.

    Attributes:
        name: The site's name in the model.
        shape: Shape of a value, batch dimensions in front; of all examples where plates are subsampled.
        event_dim: How many trailing dimensions are one event, as the model has it.
        support: Where values lie.
        plates: The vectorized plates around it; none for a single value.
        is_local: Whether one of the plates holds observations too: the site then belongs to the
            examples it was trained on, and is left to the model when predicting others.
        bias: The bias joined to this weight, if one is.
        prior_scale: The standard deviation of the prior, root mean square over elements; None where
            there is none or it is infinite.
        fan_in: Over how many terms the outputs of its module sum, 0 for what multiplies no input, such
            as a bias; None where it is not known.
        input_dim: Which dimension of a weight counts the input channels of its module; None where there
            is none, or none is known. Of a weight in no module it is the second.
        groups: In how many groups the input channels come, as those of a grouped convolution.
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
        """The sites of the model that a value of this one is for."""
        return (self.name,) if self.bias is None else (self.name, self.bias.name)

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
        # Torch would return the gradient of rows that lie apart transposed, and turn it, slowly.
        weight = weight.contiguous().view(*value.shape[:-2], *self.bias.weight_shape)
        return {self.name: weight, self.bias.name: bias.squeeze(-1)}

    @property
    def unit(self) -> float:
        """The typical size of an unconstrained value, which training takes as a unit of length.

        It is the prior's standard deviation, of a weight at most ``2 / sqrt(fan_in)``, so that outputs
        move by as much as their inputs; 1 where the prior says nothing.
        """
        if not self.is_real or self.prior_scale is None:
            return 1.0
        return (
            min(self.prior_scale, 2 / math.sqrt(self.fan_in)) if self.fan_in else self.prior_scale
        )

    @property
    def is_batch(self) -> bool:
        """Whether the site is a batch of independent events: in a plate, or without ``to_event``."""
        return self.event_dim < len(self.shape)

    @property
    def is_subsampled(self) -> bool:
        """Whether a pass has a part of it, whose numbers its plates know."""
        return any(plate.subsample_size is not None for plate in self.plates)

    @property
    def is_real(self) -> bool:
        """Whether every real value is allowed."""
        support = self.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        return support is constraints.real or isinstance(support, type(constraints.real))


def bijection_onto(support: Any) -> Any:
    """Return the map onto the support: exp alone for positive numbers, as in a log-normal."""
    positive = isinstance(support, type(constraints.positive)) and support.lower_bound == 0
    return ExpTransform() if positive else biject_to(support)


def has_bijection(support: Any) -> bool:
    """Whether a support is continuous, with a bijection from the real numbers."""
    if support.is_discrete:
        return False
    try:
        bijection_onto(support)
    except NotImplementedError:
        return False
    return True


def bijection_at(name: str, support: Any) -> Any:
    """Return the map onto the support of a site of a model.

    Args:
        name: The site's name, for the error.
        support: Its support.

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
