"""A value that counts how often a model uses it."""

from collections import Counter
from typing import Self

import torch
from torch import Tensor

from pyro_structvi._torch import inside_checkpoint, inside_forward_derivative, inside_transform
from pyro_structvi.maps.readings import Application, FactorApplication, Lookup
from pyro_structvi.weights.site_role import CHECKPOINT, SiteUse
from pyro_structvi.weights.stand_in import WeightStandIn


class CountedWeight(WeightStandIn):
    """A value that counts the calls it is an argument of.

    Args:
        value: The value.
        use: The record that keeps the count, set to zero here.

    Attributes:
        rows: The numbers of rows that met it in linear maps and look-ups.
        has_members: Whether one weight of a stack was used, which may meet any share of the rows.
    """

    _counted: Tensor
    _counts: Counter[int | None]
    rows: set[int]
    has_members: bool

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        """Make the tensor that stands for the value."""
        weight = cls._make(value, value.shape, use)
        weight._counted = value
        weight._counts = Counter()
        weight.rows = set()
        weight.has_members = False
        use.count = 0
        return weight

    def draw(self) -> Tensor:
        """Return the value, and count; a use that may be repeated or differentiated counts twice."""
        self.add_use(None)
        return self._counted

    def take_out(self) -> Tensor:
        """Return the value, and note that it may be used in the backward pass, so is drawn before."""
        self.use.drawn_first = "a reader of `parameters()`"
        return self.draw()

    def member(self, index: int) -> WeightStandIn:
        """Return one weight of a stack, whose uses count apart from those of the others."""
        return _CountedMember(self, index)

    def add_use(self, member: int | None) -> None:
        """Count a use of the whole value, or of one weight of it; of the latter the most used counts."""
        if inside_checkpoint():
            self.use.drawn_first = CHECKPOINT
        self.has_members |= member is not None
        self._counts[member] += 2 if _may_be_repeated() else 1
        most = max((count for index, count in self._counts.items() if index is not None), default=0)
        self.use.count = self._counts[None] + most

    def _draw_outputs(self, application: Application) -> None:
        self.rows.add(application.num_examples)

    def _draw_rows(self, lookup: Lookup) -> None:
        self.rows.add(lookup.num_examples)

    def _draw_per_example(self, application: FactorApplication) -> None:
        self.rows.add(application.num_examples)


class _CountedMember(WeightStandIn):
    """One weight of a stack, which counts in the stack how often it is used.

    Args:
        stack: The stack.
        index: Which weight it is.
    """

    _stack: CountedWeight
    _index: int

    def __new__(cls, stack: CountedWeight, index: int) -> Self:
        """Make the tensor that stands for the weight."""
        member = cls._make(stack, stack.shape[1:], stack.use)
        member._stack, member._index = stack, index
        return member

    def draw(self) -> Tensor:
        """Return the value, and count."""
        self._stack.add_use(self._index)
        return self._stack._counted[self._index]


def _may_be_repeated() -> bool:
    """Whether the model differentiates or maps its own net; the counting run has gradients off."""
    return torch.is_grad_enabled() or inside_transform() or inside_forward_derivative()
