"""A point: maximum a posteriori, or maximum likelihood without the prior."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyro_structvi.distributions import PointMass
from pyro_structvi.families.family import Family
from pyro_structvi.families.site import LatentSite
from pyro_structvi.families.transformed import bijection_onto, has_bijection


@dataclass(frozen=True)
class PointEstimate(Family):
    """One value; the parameter is ``loc (*shape)``, unconstrained.

    The loss is then that of a maximum a posteriori estimate, in the space of the site's own values;
    with ``kl_weight=0`` that of maximum likelihood.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*": PointEstimate()})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        15
    """

    needs: ClassVar[str] = "a continuous site, with a bijection onto its support"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is continuous, with a bijection onto its support."""
        return has_bijection(site.support)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc``."""
        return {"loc": bijection_onto(site.support).inv(loc).clone()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PointMass:
        """Return the point."""
        return PointMass(
            bijection_onto(site.support)(parameters["loc"]), site.event_dim, validate_args=False
        )
