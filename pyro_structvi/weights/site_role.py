"""The uses of a sample site, and its role in the objective."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pyro.distributions import Delta

from pyro_structvi.maps.calls import Application, Lookup

CHECKPOINT = "an activation checkpoint"
LocalReparam = bool | Literal["exact", "flipout"]


@dataclass
class SiteUse:
    """How the model uses a guide's site, and how the draw of its weight may therefore be delayed.

    Attributes:
        name: The site.
        local_reparam: True for local reparameterization wherever there is a rule for it, "exact" for
            the same only where it gives the exact joint distribution (one position for each example),
            "flipout" for "exact" with flipout elsewhere, False for weights that are always drawn.
        count: How often one pass of the model uses the site, or None before that is known. A weight
            used more than once must be the same weight each time, so it is drawn.
        drawn_first: Why the weight is drawn before the model runs, if so: since an activation checkpoint
            or a reader of ``parameters()`` uses it again in the backward pass, or since an operation
            below autograd, such as a TorchScript function, gives a stand-in no gradient.
        has_other_rows: Whether the inputs' first dimension is not that of the examples, as for nodes of
            graphs, time steps in a row, or the share of an expert: outputs drawn row by row are
            then approximate.
        has_unknown_rows: Whether that is for a reason that the call does not show.
        examples_meet: Whether what one example makes of weights reaches the observations of others, as
            in a loss over pairs: all must then have one weight.
    """

    name: str
    local_reparam: LocalReparam = True
    count: int | None = None
    drawn_first: str = ""
    has_other_rows: bool = False
    has_unknown_rows: bool = False
    examples_meet: bool = False

    def after(self, former: "SiteUse | None") -> "SiteUse":
        """Return what is known from this pass and from former ones together."""
        passes = [self] if former is None else [self, former]
        return replace(
            self,
            count=max((use.count for use in passes if use.count is not None), default=None),
            drawn_first=next((use.drawn_first for use in passes if use.drawn_first), ""),
            has_other_rows=any(use.has_other_rows for use in passes),
            has_unknown_rows=any(use.has_unknown_rows for use in passes),
            examples_meet=any(use.examples_meet for use in passes),
        )

    @property
    def gives_outputs(self) -> bool:
        """Whether the site is used once, so that outputs may be drawn in the weight's place."""
        is_allowed = self.local_reparam is True or (
            bool(self.local_reparam) and not self.has_other_rows
        )
        is_allowed = is_allowed and not self.examples_meet
        return is_allowed and self.count == 1 and not self.drawn_first

    @property
    def may_wait(self) -> bool:
        """Whether a draw may be delayed: a site that is not used need not be drawn at all."""
        return self.gives_outputs or (self.count == 0 and not self.drawn_first)

    def asks_for_exact(self, application: Application | Lookup) -> bool:
        """Whether outputs drawn here might have an approximate distribution, and that is not wanted."""
        return self.local_reparam in {"exact", "flipout"} and application.has_positions


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
