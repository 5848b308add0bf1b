"""Mean field: one mean and one standard deviation for each element."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pyro_structvi._checks import Positive
from pyro_structvi.distributions import LogScaleNormal
from pyro_structvi.families.bounds import capped_log, uncapped
from pyro_structvi.families.family import Family
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class MeanField(Family):
    """Independent normals; two parameters for each element, ``loc`` and ``log_scale``.

    Args:
        max_scale: The most that a standard deviation may be; no bound when None. A bound keeps a
            posterior from underfitting where its prior is wide.

    Raises:
        ValueError: If ``max_scale`` is not a positive number.

    Example:
        >>> from pyro_structvi.guides import StructuredGuide
        >>> import pyro
        >>> model = lambda: pyro.sample("w", pyro.distributions.Normal(torch.zeros(3), 1).to_event())
        >>> guide = StructuredGuide(model, {"w": MeanField()})
        >>> guide.initialize()
        >>> guide.draw()["w"].shape
        torch.Size([3])
    """

    max_scale: Positive | None = field(default=None, repr=False)
    needs: ClassVar[str] = "a site with real values"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site takes every real value."""
        return site.is_real

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc`` with the same standard deviation everywhere, at most half the bound."""
        return {
            "loc": loc.clone(),
            "log_scale": torch.full_like(loc, uncapped(scale, self.max_scale)),
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> LogScaleNormal:
        """Return the normals; batch dimensions are those of the site's plates."""
        log_scale = capped_log(parameters["log_scale"], self.max_scale)
        return LogScaleNormal(parameters["loc"], log_scale, site.event_dim, validate_args=False)
