"""Which families' sites draw together."""

from collections.abc import Mapping
from functools import singledispatch

from pyro_structvi.families import Family, InducingWeights, Members, SitePosterior, Subnetwork
from pyro_structvi.guides.coupling import Coupling
from pyro_structvi.guides.joint_subnetwork import JointSubnetwork
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
