"""How a model uses a weight, and how its draw may therefore be delayed."""

from dataclasses import dataclass, replace
from typing import Literal

from pyro_structvi.maps.calls import Application, Lookup

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
        is_recomputed: Whether activation checkpointing computes a use again in the backward pass.
    """

    name: str
    local_reparam: LocalReparam = True
    count: int | None = None
    is_recomputed: bool = False

    def after(self, former: "SiteUse | None") -> "SiteUse":
        """Return the uses of this pass and of former ones together: the most of all."""
        counts = [use.count for use in (self, former) if use is not None and use.count is not None]
        is_recomputed = self.is_recomputed or (former is not None and former.is_recomputed)
        return replace(self, count=max(counts, default=None), is_recomputed=is_recomputed)

    @property
    def gives_outputs(self) -> bool:
        """Whether the site is used once, so that outputs may be drawn in the weight's place."""
        return bool(self.local_reparam) and self.count == 1 and not self.is_recomputed

    @property
    def may_wait(self) -> bool:
        """Whether a draw may be delayed: a site that is not used need not be drawn at all."""
        return self.gives_outputs or (self.count == 0 and not self.is_recomputed)

    def asks_for_exact(self, application: Application | Lookup) -> bool:
        """Whether outputs drawn here might have an approximate distribution, and that is not wanted."""
        return self.local_reparam in {"exact", "flipout"} and application.has_positions
