"""Sample sites: their uses, their roles in the objective, and their nodes in a trace."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from pyro.distributions import Delta
from pyro.poutine.util import site_is_subsample

CHECKPOINT = "an activation checkpoint"
TRANSFORM = "a transform of torch.func"
LocalReparam = bool | Literal["exact", "flipout"]


@dataclass
class SiteUse:
    """How a model uses a weight, which decides how its sampling may be delayed.

    Attributes:
        name: The site.
        local_reparam: As for :class:`~pyro_structvi.guides.StructuredGuide`.
        count: The number of uses in one pass of the model, None if unknown. A weight that is used more
            than once is sampled, since all uses must see the same weight.
        eager_reason: Why the weight is sampled before the model runs, or "": its use is repeated in the
            backward pass, is in a transform of ``torch.func``, or is an operation below autograd, which
            gives a placeholder no gradient.
        has_other_rows: Whether the first dimension of inputs does not count the examples, as for nodes
            of graphs or the share of an expert. Outputs sampled row by row are then approximate.
        has_unknown_rows: Whether that is for a reason that the call does not show.
        examples_interact: Whether observations depend on the outputs of other examples, as in a loss
            over pairs. All examples then need the same weight.
        is_uncompared: Whether no run has shown if examples interact, since each applied the weight to a
            single example or had no observation. Several examples then need the same weight.
        is_read: Whether more uses it than lookups by an embedding that has its row of padding elsewhere.
        is_dependent: Whether the prior depends on another site of the same posterior, so that the KL
            needs a joint sample.
    """

    name: str
    local_reparam: LocalReparam = True
    count: int | None = None
    eager_reason: str = ""
    has_other_rows: bool = False
    has_unknown_rows: bool = False
    examples_interact: bool = False
    is_uncompared: bool = False
    is_read: bool = False
    is_dependent: bool = False

    def after(self, former: "SiteUse | None") -> "SiteUse":
        """Return the union of the uses in this pass and in former ones."""
        if former is None:
            return self
        counted = [use for use in (self, former) if use.count is not None]
        others = {"name", "local_reparam", "count", "is_uncompared"}
        names = [each.name for each in fields(self) if each.name not in others]
        found = {name: getattr(self, name) or getattr(former, name) for name in names}
        found["is_uncompared"] = bool(counted) and all(use.is_uncompared for use in counted)
        count = max((use.count or 0 for use in counted), default=None)
        return replace(self, count=count, **found)

    @property
    def allows_outputs(self) -> bool:
        """Whether outputs may be sampled in place of the weight."""
        is_local = self.local_reparam is True or (
            self.local_reparam is not False and not self.has_other_rows
        )
        return is_local and not self.examples_interact and self.count == 1 and not self.eager_reason

    @property
    def can_be_delayed(self) -> bool:
        """Whether sampling may be delayed; an unused weight need not be sampled at all."""
        return self.allows_outputs or (self.count == 0 and not self.eager_reason)


_KEY = "structvi_role"


@dataclass(frozen=True)
class SiteRole:
    """The role of a sample site in the objective, stored in its ``infer`` dictionary.

    Users mark an observation of their own model with ``infer={"is_observation": True}``.

    Attributes:
        use: How the model uses the weight that is sampled here.
        joins: The sites of the model whose values are slices of this one: a weight and its bias.
        is_slice: Whether the value is a slice of such a joint site.
        coupled: The sites of the model whose scale and mask this auxiliary site takes.
        is_auxiliary: Whether only the guide has this site.
        is_observation: Whether the site is an observation, with or without a value.
    """

    use: SiteUse | None = None
    joins: tuple[str, ...] = ()
    is_slice: bool = False
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
    """Whether a site observes data; ``pyro.deterministic`` and reparametrizations observe a Delta."""
    if not site["is_observed"] or site["infer"].get("_deterministic"):
        return False
    distribution: Any = site.get("fn")
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return not isinstance(distribution, Delta)


def sample_nodes(trace: Any) -> dict[str, Any]:
    """Return the nodes of sample sites in a trace by name, without subsamples of plates."""
    nodes = ((name, node) for name, node in trace.nodes.items() if node["type"] == "sample")
    return {name: node for name, node in nodes if not site_is_subsample(node)}
