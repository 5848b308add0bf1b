"""A value that counts how often a model uses it."""

from typing import Self

import torch
from torch import Tensor

from pyro_structvi._torch import inside_checkpoint, inside_transform
from pyro_structvi.lazy.site_use import SiteUse
from pyro_structvi.lazy.weight import WeightStandIn


class CountedWeight(WeightStandIn):
    """A value that counts the calls it is an argument of.

    Args:
        value: The value.
        use: The record that keeps the count, set to zero here.
    """

    _counted: Tensor

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        """Make the tensor that stands for the value."""
        weight = cls._make(value, value.shape, use)
        weight._counted = value
        use.count = 0
        return weight

    def draw(self) -> Tensor:
        """Return the value, and count; a use that may be repeated or differentiated counts twice."""
        self.use.is_recomputed |= inside_checkpoint()
        self.use.count = (self.use.count or 0) + (2 if _may_be_repeated() else 1)
        return self._counted


def _may_be_repeated() -> bool:
    """Whether the model differentiates or maps its own net; the counting run has gradients off."""
    return torch.is_grad_enabled() or inside_transform()
