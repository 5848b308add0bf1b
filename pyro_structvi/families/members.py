"""A few weights, each trained as a point: the posterior of an ensemble."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyro_structvi._checks import check_positive_integer
from pyro_structvi.distributions import PointMixture
from pyro_structvi.families.family import Family, LatentSite


@dataclass(frozen=True)
class Members(Family):
    """One of K values, all equally likely; the parameter is ``members (K, *shape)``.

    For inducing weights it is Ensemble-U; see :class:`InducingWeights`.

    Args:
        size: The number K of members, at least 1.

    Raises:
        ValueError: If the size is not a whole number of at least 1.

    References:
        Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive uncertainty
        estimation using deep ensembles"; Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty
        representation in deep learning with inducing weights", section 3.1.
    """

    size: int = 5
    needs: ClassVar[str] = "a site with real values, in no plate"

    def __post_init__(self) -> None:
        """Check the size."""
        check_positive_integer("size", self.size)

    def fits(self, site: LatentSite) -> bool:
        """Whether the site takes every real value."""
        return site.is_real and not site.plates

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start apart from each other by as much as the elements of ``loc`` are from zero."""
        spread = loc.square().mean().sqrt().clamp_min(scale)
        return {"members": loc + spread * loc.new_empty(self.size, *loc.shape).normal_()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PointMixture:
        """Return the mixture."""
        return PointMixture(parameters["members"], site.event_dim, validate_args=False)
