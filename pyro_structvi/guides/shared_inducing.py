"""One posterior over the inducing weights of several sites."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi.distributions import Auxiliary
from pyro_structvi.families import InducingWeights, LatentSite, SitePosterior
from pyro_structvi.guides.coupling import SharedPosterior


class SharedInducing(SharedPosterior):
    """One posterior over the inducing weights of several sites, stacked as the rows of a matrix.

    The matrix has as many columns as the widest site; a narrower one uses the first of its rows.

    Args:
        family: The family of the sites.
        posteriors: The sites, whose own means of the inducing weights become the start.
        scale: The standard deviation that each element of a weight starts with.
    """

    def __init__(
        self, family: InducingWeights, posteriors: Mapping[str, SitePosterior], scale: float
    ) -> None:
        starts = {name: posterior.release("inducing_loc") for name, posterior in posteriors.items()}
        shapes = {name: start.shape for name, start in starts.items()}
        columns = max(shape[1] for shape in shapes.values())
        loc = torch.cat([
            nn.functional.pad(start, (0, columns - start.shape[1])) for start in starts.values()
        ])
        name = f"inducing_weights of {next(iter(starts))}"
        site = LatentSite(name, loc.shape, 2, constraints.real, prior_scale=1.0)
        logs = [math.log(scale / family.prior_scales(post.site)[0]) for post in posteriors.values()]
        start = family.posterior.init(site, loc, math.exp(sum(logs) / len(logs)))
        super().__init__(posteriors, SitePosterior(family.posterior, site, start))
        self.shapes = shapes

    def auxiliary(self, q: Any) -> Auxiliary:
        """Return the shared distribution with the standard normal prior of whitened inducing weights."""
        zero, one = q.mean.new_zeros(()), q.mean.new_ones(())
        return Auxiliary(q, Normal(zero, one).expand(q.event_shape).to_event(2))

    def split(self, value: Tensor, q: Any) -> dict[str, Tensor]:
        """Return each site's rows, as many columns of them as it has."""
        parts = value.split([shape[0] for shape in self.shapes.values()])
        return {
            name: part[:, : shape[1]]
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Refuse: a part of a draw has no variance here."""
        raise NotImplementedError(
            f"The sites {list(self.sites)} have one posterior of their inducing weights, of which the "
            "guide does not compute each site's quantiles. Take those of draws: `guide.draw()`."
        )
