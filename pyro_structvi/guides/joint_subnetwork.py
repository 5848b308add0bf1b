"""One posterior over chosen elements of several sites."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.distributions import PointMixture, WeightDistribution
from pyro_structvi.families import Family, LatentSite, SitePosterior
from pyro_structvi.families.subnetwork import ChosenPart
from pyro_structvi.guides.coupling import SharedPosterior


class JointSubnetwork(SharedPosterior):
    """The posterior of the chosen elements of several sites, one after another in a vector.

    Its auxiliary site counts the entropy; the sites count their priors.

    Args:
        family: Its family.
        posteriors: The sites.
        scale: The standard deviation that each element starts with.
    """

    def __init__(
        self, family: Family, posteriors: Mapping[str, SitePosterior], scale: float
    ) -> None:
        starts = {
            name: post.value("rest").flatten()[post.value("index")]
            for name, post in posteriors.items()
        }
        loc = torch.cat(list(starts.values()))
        if not len(loc):
            raise ValueError(
                f"`chosen` must choose at least one element of the sites {list(starts)}, but all its "
                "masks there are false."
            )
        site = LatentSite(f"subnetwork of {next(iter(starts))}", loc.shape, 1, constraints.real)
        if not family.fits(site):
            raise TypeError(
                f"{family} needs {family.needs}, but the chosen elements are one vector. Use "
                "`FullCovariance()`, `LowRank(rank=2)` or `MeanField()`."
            )
        super().__init__(posteriors, SitePosterior(family, site, family.init(site, loc, scale)))
        q = self.posterior()
        if not isinstance(q, WeightDistribution) or isinstance(q, PointMixture):
            raise TypeError(
                f"The chosen elements need a posterior with a density, but got {family}. Use "
                "`FullCovariance()`, `LowRank(rank=2)` or `MeanField()`."
            )
        self.sizes = {name: len(start) for name, start in starts.items()}

    @property
    def coupled(self) -> tuple[str, ...]:
        """The sites of which something is chosen."""
        return tuple(name for name, size in self.sizes.items() if size)

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found late may join: those of which nothing is chosen."""
        return not any(len(post.value("index")) for post in posteriors.values())

    def split(self, value: Tensor, q: Any) -> dict[str, Any]:
        """Return each site's chosen elements, with their means and variances."""
        parts = (vector.split(list(self.sizes.values())) for vector in (value, q.mean, q.variance))
        return {
            name: ChosenPart(*part)
            for name, part in zip(self.sizes, zip(*parts, strict=True), strict=True)
        }
