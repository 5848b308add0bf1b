"""Sites that are drawn together."""

from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import Any, Literal

import pyro
from torch import Tensor, nn

from pyro_structvi._pyro import inside_plate
from pyro_structvi.sites.autoguide import module_key
from pyro_structvi.sites.family import Family
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.weights.auxiliary import Auxiliary
from pyro_structvi.weights.site_role import SiteRole

How = Literal["sample", "draw", "mean", "marginals"]


class Coupling(nn.Module):
    """What several sites of a guide draw together, once for each pass of the model.

    ``sample``, ``draw``, ``mean`` and ``marginals`` return, by site, what the site's distribution is
    then taken ``given``, such as the whitened inducing weights ``(M_out, M_in)`` or a member. Their
    arguments are the distributions at the current parameters by site, one of the guide's own included,
    and the number of the pass, by which members of an ensemble take turns; None for any.

    Args:
        sites: The names of the sites.
    """

    def __init__(self, sites: Iterable[str]) -> None:
        super().__init__()
        self.sites = tuple(sites)

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found late may join."""
        return False

    def given(self, how: How, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return, by site, the site's distribution given what is drawn together.

        Args:
            how: Whether that is sampled as a part of a guide, drawn, or averaged; or whether each site's
                distribution is by itself.
            at: The distributions at the current parameters.
            number: The number of the pass.
        """
        parts = getattr(self, how)(at, number)
        return {name: at[name].given(part) for name, part in parts.items() if name in at}

    def sample(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw as a part of a guide, with a sample site where there is a KL to count."""
        return self.draw(at, number)

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw as ordinary tensors."""
        raise NotImplementedError

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the means."""
        raise NotImplementedError

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return what gives each site's distribution by itself; nothing where it has that already."""
        return {}


class SharedPosterior(Coupling):
    """One posterior over something of several sites, at an auxiliary sample site.

    Args:
        sites: The names of the sites.
        posterior: The posterior that they share.
    """

    def __init__(self, sites: Iterable[str], posterior: SitePosterior) -> None:
        super().__init__(sites)
        self.posterior = posterior

    @property
    def coupled(self) -> tuple[str, ...]:
        """The sites whose scale and mask in the model the shared KL takes."""
        return self.sites

    def auxiliary(self, q: Any) -> Auxiliary:
        """Return the shared distribution as the guide samples it, with its prior."""
        return Auxiliary(q)

    def split(self, value: Tensor, q: Any) -> dict[str, Any]:
        """Return the part of each site."""
        raise NotImplementedError

    def sample(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw at an auxiliary sample site."""
        name, infer = self.posterior.site.name, SiteRole(coupled=self.coupled, is_auxiliary=True)
        return self.split(
            pyro.sample(name, self.auxiliary(at[name]), infer=infer.as_infer()), at[name]
        )

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw, and return the parts."""
        q = at[self.posterior.site.name]
        return self.split(q.rsample(), q)

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the parts of the mean."""
        q = at[self.posterior.site.name]
        return self.split(q.mean, q)

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the parts of the mean, where these carry their variances."""
        return self.mean(at, number)


@singledispatch
def couple(
    family: Family, posteriors: Mapping[str, SitePosterior], scale: float
) -> Coupling | None:
    """Return what sites of a family draw together, or None where they are independent.

    A family of which this is not None registers a function here, by ``couple.register``.

    Args:
        family: The family.
        posteriors: The posteriors of all its sites, by site.
        scale: The standard deviation of each element at the start.
    """
    return None


def couple_families(
    posteriors: Iterable[SitePosterior], known: nn.ModuleDict, scale: float
) -> None:
    """Make what the sites of each family draw together, once; its key is that of its first site.

    Args:
        posteriors: The posteriors of all sites.
        known: What sites draw together already; new couplings are added.
        scale: The standard deviation of each element at the start.

    Raises:
        ValueError: If sites that draw together were found too late.
    """
    groups: dict[Family, dict[str, SitePosterior]] = {}
    for posterior in posteriors:
        groups.setdefault(posterior.family, {})[posterior.site.name] = posterior
    for family, own in groups.items():
        couplings = (each for each in known.values() if isinstance(each, Coupling))
        coupling = next((each for each in couplings if own.keys() & set(each.sites)), None)
        if coupling is None:
            made = couple(family, own, scale)
            if made is not None:
                known[module_key(next(iter(own)))] = made
            continue
        late = {name: own[name] for name in own if name not in coupling.sites}
        if late and not coupling.takes(late):
            raise ValueError(
                f"The sites {[*coupling.sites]} are drawn together, and {[*late]} were found only now. "
                "Make the guide from a function, so that it finds all sites in one run, or give these a "
                "separate family."
            )
        coupling.sites += tuple(late)


def check_no_plates_around(couplings: Iterable[Coupling]) -> None:
    """Raise a ``NotImplementedError`` if sites that draw together stand in the plates of particles."""
    sites = [list(each.sites) for each in couplings]
    if sites and inside_plate():
        raise NotImplementedError(
            f"The sites {sites} are drawn together, once for all particles, and so not inside the "
            "plates of `vectorize_particles=True` or `parallel=True`. Leave these out, or take "
            "`StructuredELBO(vectorize_particles=True)` and `pyro_structvi.predict`."
        )
