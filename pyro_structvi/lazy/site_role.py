"""What a sample site is to the objective, in one record that travels with the site."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pyro.distributions import Delta

from pyro_structvi.lazy.site_use import SiteUse

_KEY = "structvi_role"


@dataclass(frozen=True)
class SiteRole:
    """What a sample site is, beyond its name and its distribution.

    A guide writes the record with :meth:`as_infer`; :meth:`of` reads it from a trace. Users mark an
    observation of their own model with ``infer={"is_observation": True}``.

    Attributes:
        use: How the model uses the weight that is sampled here, so that its draw may be delayed.
        joins: The model's sites whose values are parts of this one: a weight and its bias.
        is_part: Whether the value is a part of such a joint site's.
        coupled: The model's sites whose scale and mask this auxiliary site takes.
        is_auxiliary: Whether the guide has this site and the model does not.
        is_observation: Whether the site is an observation, with or without a value.

    Example:
        >>> infer = SiteRole(joins=("weight", "bias"), is_auxiliary=True).as_infer()
        >>> SiteRole.of({"infer": infer, "is_observed": False}).joins
        ('weight', 'bias')
    """

    use: SiteUse | None = None
    joins: tuple[str, ...] = ()
    is_part: bool = False
    coupled: tuple[str, ...] = ()
    is_auxiliary: bool = False
    is_observation: bool = False

    def as_infer(self) -> dict[str, Any]:
        """Return the ``infer`` of a ``pyro.sample`` statement."""
        own: dict[str, Any] = {_KEY: self}
        return own | {"is_auxiliary": True} if self.is_auxiliary else own

    @classmethod
    def of(cls, site: Mapping[str, Any]) -> Self:
        """Return the role of a site, given its message or its node in a trace."""
        infer = site["infer"]
        role = infer.get(_KEY)
        if isinstance(role, cls):
            return role
        return cls(
            is_auxiliary=bool(infer.get("is_auxiliary")),
            is_observation=bool(infer.get("is_observation")) or _is_data(site),
        )


def _is_data(site: Mapping[str, Any]) -> bool:
    """Whether a site observes data, and not a value that the model has computed.

    ``pyro.deterministic`` and reparametrizations record such values by an observed Delta.
    """
    if not site["is_observed"] or site["infer"].get("_deterministic"):
        return False
    distribution: Any = site.get("fn")
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return not isinstance(distribution, Delta)
