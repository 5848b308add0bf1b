"""A few weights, each trained as a point: the posterior of an ensemble."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pyro_structvi._checks import Count
from pyro_structvi.distributions import PointMass, PointMixture
from pyro_structvi.families.family import Family
from pyro_structvi.families.site import LatentSite
from pyro_structvi.families.transformed import bijection_onto, has_bijection


@dataclass(frozen=True)
class Members(Family):
    """One of K values, all equally likely; the parameter is ``members (K, *shape)``, unconstrained.

    Sites of this family take the same member in one pass of the model, so that a member of an ensemble
    is a whole net; :class:`~pyro_structvi.EnsembleGuide` trains all in one pass. For inducing weights it
    is Ensemble-U; see :class:`InducingWeights`.

    Args:
        size: The number K of members, at least 1.
        vectorize: Whether a training step runs all members in one pass, by :func:`torch.func.vmap`;
            otherwise one after the other. Where other sites have other families, a step trains one
            member, chosen at random.

    Raises:
        ValueError: If the size is not a whole number of at least 1.

    References:
        Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive uncertainty
        estimation using deep ensembles"; Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty
        representation in deep learning with inducing weights", section 3.1.
    """

    size: Count = 5
    vectorize: bool = field(default=True, repr=False, compare=False)
    needs: ClassVar[str] = "a continuous site, with a bijection onto its support"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is continuous, with a bijection onto its support."""
        return has_bijection(site.support)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start the first at ``loc``, the others at its elements in random order, plus N(0, scale^2)."""
        first = bijection_onto(site.support).inv(loc)
        members = first.new_empty(self.size, first.numel())
        members[0] = first.flatten()
        for number in range(1, self.size):
            order = torch.randperm(first.numel(), device=first.device)
            noise = first.new_empty(first.numel()).normal_()
            members[number] = members[0][order] + scale * noise
        return {"members": members.reshape(self.size, *first.shape)}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PointMixture:
        """Return the mixture."""
        return _MembersOf(site, bijection_onto(site.support)(parameters["members"]))


class _MembersOf(PointMixture):
    """The members of a site, which take its plates along."""

    def __init__(self, site: LatentSite, members: Tensor) -> None:
        super().__init__(members, members.dim() - 1, validate_args=False)
        self._event_dim = site.event_dim

    def given(self, value: Tensor) -> PointMass:
        """Return the distribution where it is known which member it is: that member."""
        return PointMass(value, self._event_dim, validate_args=False)
