"""A value that counts how often a model uses it."""

from typing import Self

import torch
from torch import Tensor

from pyro_structvi._torch import inside_checkpoint, inside_forward_derivative, inside_transform
from pyro_structvi.lazy.site_use import SiteUse
from pyro_structvi.lazy.weight import WeightStandIn
from pyro_structvi.maps.calls import Application, FactorApplication, Lookup


class CountedWeight(WeightStandIn):
    """A value that counts the calls it is an argument of.

    Args:
        value: The value.
        use: The record that keeps the count, set to zero here.

    Attributes:
        rows: The numbers of rows that met it in linear maps and look-ups.
    """

    _counted: Tensor
    rows: set[int]

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        """Make the tensor that stands for the value."""
        weight = cls._make(value, value.shape, use)
        weight._counted = value
        weight.rows = set()
        use.count = 0
        return weight

    def draw(self) -> Tensor:
        """Return the value, and count; a use that may be repeated or differentiated counts twice."""
        self.use.is_recomputed |= inside_checkpoint()
        self.use.count = (self.use.count or 0) + (2 if _may_be_repeated() else 1)
        return self._counted

    def _draw_outputs(self, application: Application) -> None:
        self.rows.add(application.num_examples)

    def _draw_rows(self, lookup: Lookup) -> None:
        self.rows.add(lookup.num_examples)

    def _draw_per_example(self, application: FactorApplication) -> None:
        self.rows.add(application.num_examples)


def _may_be_repeated() -> bool:
    """Whether the model differentiates or maps its own net; the counting run has gradients off."""
    return torch.is_grad_enabled() or inside_transform() or inside_forward_derivative()
