"""Placeholders that count their uses."""

from collections import Counter
from typing import Self

import torch
from torch import Tensor

from pyro_structvi._torch import inside_checkpoint, inside_forward_derivative, inside_transform
from pyro_structvi.maps.calls import Call
from pyro_structvi.weights.lazy import WeightPlaceholder
from pyro_structvi.weights.site_role import CHECKPOINT, SiteUse


class CountedWeight(WeightPlaceholder):
    """A value that counts the calls it is an argument of, in its use."""

    _value: Tensor
    _counts: Counter[int | None]
    num_examples: set[int]
    is_indexed: bool

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        use.count = 0
        own = {"_counts": Counter(), "num_examples": set(), "is_indexed": False}
        return cls._make(value, value.shape, use, _value=value, **own)

    def draw(self) -> Tensor:
        self.add_use(None)
        return self._value

    def materialize(self) -> Tensor:
        self.use.eager_reason = "a reader of `parameters()`"
        return self.draw()

    def item_of_stack(self, index: int) -> WeightPlaceholder:
        return _CountedItem(self, index)

    def add_use(self, index: int | None) -> None:
        """Count a use of the whole value, or of one weight of a stack; the most used weight decides.

        A use that may be repeated or differentiated counts twice.
        """
        if inside_checkpoint():
            self.use.eager_reason = CHECKPOINT
        self.is_indexed |= index is not None
        # The counting run has gradients off, unless the model differentiates its own net.
        is_repeated = torch.is_grad_enabled() or inside_transform() or inside_forward_derivative()
        self._counts[index] += 2 if is_repeated else 1
        items = (count for item, count in self._counts.items() if item is not None)
        self.use.count = self._counts[None] + max(items, default=0)

    def sample_outputs(self, call: Call) -> None:
        self.num_examples.add(call.num_examples)


class _CountedItem(WeightPlaceholder):
    """One weight of a counted stack."""

    _stack: CountedWeight
    _index: int

    def __new__(cls, stack: CountedWeight, index: int) -> Self:
        return cls._make(stack, stack.shape[1:], stack.use, _stack=stack, _index=index)

    def draw(self) -> Tensor:
        self._stack.add_use(self._index)
        return self._stack._value[self._index]
