"""What the sites of one family draw together: inducing weights, or the member of an ensemble."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi.distributions import Auxiliary
from pyro_structvi.families.family import Family, LatentSite, SitePosterior
from pyro_structvi.lazy.site_role import SiteRole

_MEMBER: ContextVar[Tensor | int | None] = ContextVar("member", default=None)


@contextmanager
def one_member(number: Tensor | int | None) -> Iterator[None]:
    """Let ensembles take the member of this number in this block, modulo their size; None for any."""
    token = _MEMBER.set(number)
    try:
        yield
    finally:
        _MEMBER.reset(token)


class Coupling(nn.Module):
    """What several sites of a guide draw together, for each pass of the model once.

    ``sample``, ``draw`` and ``mean`` return, by site, what the site's law is then taken ``given``, such
    as the whitened inducing weights ``(M_out, M_in)`` or a member's value.
    """

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found late may join."""
        return False

    def check_visited(self, sites: Collection[str]) -> None:
        """Raise a ``ValueError`` if a model that visits only these sites leaves the bound unbounded."""

    def sample(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Any]:
        """Draw as a part of a guide, with a sample site where there is a KL to count.

        The ``coupled`` of its role names the sites whose scale and mask in the model it takes.
        """
        return self.draw(posteriors)

    def draw(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Any]:
        """Draw as ordinary tensors."""
        raise NotImplementedError

    def mean(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Any]:
        """Return the means."""
        raise NotImplementedError


class SameMember(Coupling):
    """The member of an ensemble, the same in each layer: a member is a whole net."""

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found late may join; all may."""
        return True

    def draw(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Take the member of :func:`one_member`, or choose one."""
        members = {name: post.family.members(post) for name, post in posteriors.items()}
        first, number = next(iter(members.values())), _MEMBER.get()
        if number is None:
            number = torch.randint(len(first), (), device=first.device)
        if isinstance(number, int):
            return {name: values[number % len(values)] for name, values in members.items()}
        row = number.reshape(1)  # read on the device: the host does not wait
        return {
            name: values.index_select(0, row % len(values)).squeeze(0)
            for name, values in members.items()
        }

    def mean(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
        """Return the mean over members."""
        return {name: post.family.members(post).mean(0) for name, post in posteriors.items()}


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
        infer = SiteRole(coupled=tuple(posteriors), is_auxiliary=True).as_infer()
        return self._split(pyro.sample(self.site_name, Auxiliary(q, prior), infer=infer))

    def draw(self, posteriors: Mapping[str, SitePosterior]) -> dict[str, Tensor]:
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
