"""Mean field: one mean and one standard deviation for each element."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.families.family import Family, LatentSite


@dataclass(frozen=True)
class MeanField(Family):
    """Independent normals; two parameters for each element, ``loc`` and ``log_scale``.

    Example:
        >>> from pyro_structvi.guides import StructuredGuide
        >>> import pyro
        >>> model = lambda: pyro.sample("w", pyro.distributions.Normal(torch.zeros(3), 1).to_event())
        >>> guide = StructuredGuide(model, {"w": MeanField()})
        >>> guide.initialize()
        >>> guide.draw()["w"].shape
        torch.Size([3])
    """

    needs: ClassVar[str] = "a site with real values"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site takes every real value."""
        return site.is_real

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc`` with the same standard deviation everywhere."""
        return {
            "loc": loc.clone(),
            "log_scale": torch.full_like(loc, scale).log(),
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> MeanFieldNormal:
        """Return the normals; batch dimensions are those of the site's plates."""
        scale = parameters["log_scale"].exp()
        return MeanFieldNormal(parameters["loc"], scale, site.event_dim, validate_args=False)
