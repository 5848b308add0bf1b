"""What the sites of one family draw together: inducing weights, or the member of an ensemble."""

from collections.abc import Mapping
from typing import ClassVar

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi.distributions import Auxiliary
from pyro_structvi.families.family import Family, LatentSite, SitePosterior


class Coupling(nn.Module):
    """What several sites of a guide draw together, for each pass of the model once.

    Each method returns, by site, what the site's law is then taken ``given``, such as the whitened
    inducing weights ``(M_out, M_in)`` or a member's value.

    Attributes:
        takes_more_sites: Whether sites that are found later may join.
    """

    takes_more_sites: ClassVar[bool] = False

    def sample(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Draw as a part of a guide, with a sample site where there is a KL to count."""
        return self.draw(posteriors)

    def draw(
        self, posteriors: Mapping[str, SitePosterior], number: int | None = None
    ) -> dict[str, Tensor]:
        """Draw as ordinary tensors; with a number, the draw of that number in a sequence of them."""
        raise NotImplementedError

    def mean(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Return the means."""
        raise NotImplementedError


class SameMember(Coupling):
    """The member of an ensemble, the same in each layer: a member is a whole net."""

    takes_more_sites: ClassVar[bool] = True

    def members(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Return all members ``(K, *shape)`` of each site."""
        return {name: post.family.members(post) for name, post in posteriors.items()}

    def draw(
        self, posteriors: Mapping[str, SitePosterior], number: int | None = None
    ) -> dict[str, Tensor]:
        """Choose a member; in a sequence of draws the members take turns."""
        members = self.members(posteriors)
        first = next(iter(members.values()))
        if number is None:
            chosen = torch.randint(len(first), (), device=first.device)
            return {name: values[chosen] for name, values in members.items()}
        return {name: values[number % len(first)] for name, values in members.items()}

    def mean(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Return the mean over members."""
        return {name: values.mean(0) for name, values in self.members(posteriors).items()}


class SharedInducing(Coupling):
    """One posterior over the inducing weights of several sites, stacked as the rows of a matrix.

    The matrix has as many columns as the widest site; a narrower one uses the first of its rows.

    Args:
        family: The family of the posterior over the stacked matrix.
        starts: Where each site's inducing weights start, by site.
        scale: The standard deviation that each of them starts with.
    """

    def __init__(self, family: Family, starts: Mapping[str, Tensor], scale: float) -> None:
        super().__init__()
        self.site_name = f"inducing_weights of {next(iter(starts))}"
        self.shapes = {site: start.shape for site, start in starts.items()}
        columns = max(shape[1] for shape in self.shapes.values())
        loc = torch.cat([
            nn.functional.pad(start, (0, columns - start.shape[1])) for start in starts.values()
        ])
        site = LatentSite(self.site_name, loc.shape, 2, constraints.real, prior_scale=1.0)
        self.posterior = SitePosterior(family, site, family.init(site, loc, scale))

    def sample(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Draw at an auxiliary sample site."""
        q = self.posterior()
        like = q.mean
        prior = Normal(like.new_zeros(()), like.new_ones(())).expand(like.shape).to_event(2)
        infer = {"is_auxiliary": True}
        return self._split(pyro.sample(self.site_name, Auxiliary(q, prior), infer=infer))

    def draw(
        self, posteriors: Mapping[str, SitePosterior], number: int | None = None
    ) -> dict[str, Tensor]:
        """Draw the stacked matrix."""
        return self._split(self.posterior().rsample())

    def mean(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Return the parts of the mean."""
        return self._split(self.posterior().mean)

    def _split(self, stacked: Tensor) -> dict[str, Tensor]:
        parts = stacked.split([shape[0] for shape in self.shapes.values()])
        return {
            name: part[:, : shape[1]]
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
