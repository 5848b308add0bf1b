"""Mean field of which a part was pruned."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_structvi.distributions import PrunedNormal
from pyro_structvi.families.mean_field import MeanField
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class PrunedMeanField(MeanField):
    """Independent normals, some of them pruned: exactly zero, and no variables of the model any more.

    Beside the parameters of :class:`MeanField` there is the constant ``kept``, true everywhere at the
    start. :func:`pyro_structvi.pruning.prune_mean_field` sets it.

    Args:
        max_scale: As for :class:`MeanField`.
    """

    constants: ClassVar[tuple[str, ...]] = ("kept",)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start as :class:`MeanField` does, with nothing pruned."""
        return {**super().init(site, loc, scale), "kept": torch.ones_like(loc, dtype=torch.bool)}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PrunedNormal:
        """Return the normals that are left, and zeros."""
        normal = super().distribution(site, **parameters)
        return PrunedNormal(
            normal.loc, normal.scale, parameters["kept"], site.event_dim, validate_args=False
        )
