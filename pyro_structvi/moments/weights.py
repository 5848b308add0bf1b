"""Random weights: moments of what a guide's sites hold."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from pyro_structvi._torch import without_storage
from pyro_structvi.distributions import PointMass, WeightDistribution
from pyro_structvi.distributions.own_tensors import base_of
from pyro_structvi.distributions.transformed import TransformedNormal
from pyro_structvi.families import LatentSite
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.guides.joint_posterior import JointPosterior
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.moments.random_tensor import RandomTensor, Settings

Part = Literal["whole", "weight", "bias"]
Sites = Sequence[tuple[LatentSite, Any]]

NODES = 32  # for the moments of what is pushed onto a support


class RandomWeight(RandomTensor):
    """A weight with a structured posterior, or the weight or bias of one that they have together.

    Linear maps ask the distribution for the moments of their outputs. Anything else sees the means and
    variances of its elements, which are formed when they are asked for.

    Args:
        distribution: The distribution.
        settings: How moments are propagated.
        part: What of the distribution this is.
        shape: The shape of that part.

    Attributes:
        applied: What linear maps have formed of it, by how they take it.
    """

    distribution: WeightDistribution
    part: Part
    applied: dict[Any, Any]

    def __new__(
        cls,
        distribution: WeightDistribution,
        settings: Settings,
        part: Part = "whole",
        shape: torch.Size | None = None,
    ) -> Self:
        """Make the tensor that stands for the weight."""
        shape = distribution.event_shape if shape is None else shape
        weight = without_storage(cls, shape, distribution._first_parameter)
        weight.distribution, weight.part, weight.applied = distribution, part, {}
        weight.settings, weight.covariance = settings, None
        return weight

    @property
    def loc(self) -> Tensor:
        """The means."""
        return self._take(self.distribution.mean)

    @property
    def variance(self) -> Tensor:
        """The variances."""
        return self._take(self.distribution.variance)

    def become(self, other: RandomTensor) -> Self:
        """Refuse: the posterior would not know of it."""
        raise NotImplementedError("A random weight that is changed in place has no moments")

    def _take(self, values: Tensor) -> Tensor:
        if self.part == "whole":
            return values
        return values[:, -1] if self.part == "bias" else values[:, :-1].reshape(self.shape)


def member_numbers(guide: StructuredGuide) -> list[int | None]:
    """Return the numbers of an ensemble's members, each of which is a posterior; else one None."""
    return [None] if guide.ensemble is None else [*range(guide.ensemble.size)]


def posteriors_of(joint: JointPosterior, number: int | None = None) -> Sites:
    """Return each global site and its distribution by itself, or that of a member of an ensemble."""
    return [*joint.given("marginals" if number is None else "draw", number=number)]


def by_name(sites: Sites) -> dict[str, Any]:
    """Return the distributions by the names of their sites."""
    return {site.name: q for site, q in sites}


def random_values(sites: Sites, settings: Settings) -> dict[str, Tensor]:
    """Return the value of each site: random, or a tensor where it is known.

    Args:
        sites: The sites and their distributions.
        settings: How moments are propagated.
    """
    values: dict[str, Tensor] = {}
    for site, q in sites:
        if isinstance(q, WeightDistribution) and site.bias is not None:
            weight, bias = site.names
            values[weight] = RandomWeight(q, settings, "weight", site.bias.weight_shape)
            values[bias] = RandomWeight(q, settings, "bias", site.shape[:1])
        elif isinstance(q, WeightDistribution) and not q.batch_shape:
            values[site.name] = RandomWeight(q, settings)
        else:
            values |= site.split(_value_of(q, settings))
    return values


def _value_of(q: Any, settings: Settings) -> Tensor:
    base = base_of(q)
    if isinstance(base, PointMass):
        mean: Tensor = q.mean
        return mean
    if not isinstance(base, TransformedNormal):
        return RandomTensor(q.mean, q.variance, settings)
    nodes, weights = gauss_hermite(NODES, base.base_dist.mean)
    values = base.at(nodes)
    mean = torch.einsum("k,k...->...", weights, values)
    variance = torch.einsum("k,k...->...", weights, (values - mean).square())
    return RandomTensor(mean, variance, settings)
