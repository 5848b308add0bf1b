"""Which families' sites draw together."""

from collections.abc import Iterable, Mapping
from functools import singledispatch

from torch import nn

from pyro_structvi._pyro import inside_plate
from pyro_structvi.families import Family, InducingWeights, Members, SitePosterior, Subnetwork
from pyro_structvi.guides.coupling import Coupling
from pyro_structvi.guides.joint_subnetwork import JointSubnetwork
from pyro_structvi.guides.parameters import module_key
from pyro_structvi.guides.same_member import SameMember
from pyro_structvi.guides.shared_inducing import SharedInducing


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


@couple.register
def _(family: Members, posteriors: Mapping[str, SitePosterior], scale: float) -> Coupling | None:
    return SameMember(posteriors)


@couple.register
def _(
    family: InducingWeights, posteriors: Mapping[str, SitePosterior], scale: float
) -> Coupling | None:
    if isinstance(family.posterior, Members):
        return SameMember(posteriors)
    return SharedInducing(family, posteriors, scale) if family.shared else None


@couple.register
def _(family: Subnetwork, posteriors: Mapping[str, SitePosterior], scale: float) -> Coupling | None:
    return JointSubnetwork(family.posterior, posteriors, scale)


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
