"""How a model uses a weight, and how its draw may therefore be delayed."""

from dataclasses import dataclass, replace
from typing import Literal

from pyro_structvi.maps.readings import Application, Lookup

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
