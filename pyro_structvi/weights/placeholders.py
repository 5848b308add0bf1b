"""Placeholders of parts of a joint draw, of draws that wait for an input, and of counted values."""

from collections import Counter
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from pyro_structvi._torch import (
    inside_checkpoint,
    inside_forward_derivative,
    inside_transform,
)
from pyro_structvi.maps.calls import Application, FactorApplication, Lookup
from pyro_structvi.maps.linear_map import BiasColumnMap
from pyro_structvi.weights.lazy import LazyWeight, WeightPlaceholder
from pyro_structvi.weights.site_role import CHECKPOINT, SiteUse
from pyro_structvi.weights.weight_distribution import FactoredWeight


class LazySlice(WeightPlaceholder):
    """A weight or its bias, as a part of a joint draw that has not been made yet.

    Where a linear map gets both parts of one draw, its outputs are drawn from the image of the joint
    distribution. Any other use takes the part out of an ordinary draw.

    Args:
        whole: The joint draw, ``(out, in + 1)``.
        shape: The shape of the part.
        take: Returns the part of a joint draw.
        use: The record of the part's own site.
    """

    whole: LazyWeight
    _take: Callable[[Tensor], Tensor]

    def __new__(
        cls, whole: LazyWeight, shape: torch.Size, take: Callable[[Tensor], Tensor], use: SiteUse
    ) -> Self:
        """Make the tensor that stands for the part."""
        part = cls._make(whole, shape, use)
        part.whole = whole
        part._take = take
        return part

    def draw(self) -> Tensor:
        """Return the part of the joint draw, which is made at the first call and kept."""
        return self._take(self.whole.draw())

    def _draw_outputs(self, application: Application) -> Tensor | None:
        bias, together = application.bias, application._replace(weight=self.whole, bias=None)
        linear_map, x = application.linear_map, application.x
        whole = bias.whole if isinstance(bias, LazySlice) else None
        is_other = whole is not self.whole or application.arrangement is not None
        if is_other or isinstance(x, WeightPlaceholder):
            return None
        if isinstance(self.whole.distribution, FactoredWeight):
            linear_map = BiasColumnMap(linear_map)
        else:
            linear_map, x = linear_map.join_bias(x)
        return self.whole._draw_outputs(together._replace(linear_map=linear_map, x=x))


class DeferredSample:
    """What becomes of a weight, and of the bias that is drawn with it, at its first linear map.

    Args:
        name: The weight's site.
        draw: Returns the values of the sites, by name, for the call that applies the weight.
    """

    def __init__(self, name: str, draw: Callable[[Application], dict[str, Tensor]]) -> None:
        self.name, self._draw = name, draw
        self._values: dict[str, Tensor] | None = None
        self.has_failed = False

    def happen(self, application: Application) -> None:
        """Draw the weight, unless it was drawn before."""
        if self._values is None:
            self.has_failed = True
            self._values = self._draw(application)
            self.has_failed = False

    def value(self, name: str) -> Tensor:
        """Return the value of a site.

        Raises:
            RuntimeError: If the weight has met no input so far.
        """
        if self._values is None:
            self.has_failed = True
            raise RuntimeError(
                f"The weight at site '{self.name}' is drawn given the inputs of a linear layer or "
                f"convolution, but the net uses '{name}' in another way first. Give it another family, "
                f"as by `families={{'{self.name}': MeanField()}}`."
            )
        return self._values[name]


class DeferredWeight(WeightPlaceholder):
    """A weight or a bias that waits for the first input of the weight.

    Args:
        meeting: What happens then.
        name: The site that this stands for.
        value: A tensor of its shape, dtype and device.
    """

    meeting: DeferredSample
    _name: str

    def __new__(cls, meeting: DeferredSample, name: str, value: Tensor) -> Self:
        """Make the tensor that stands for a draw."""
        weight = cls._make(value, value.shape, SiteUse(name))
        weight.meeting, weight._name = meeting, name
        return weight

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        """Show the site and the shape."""
        return f"DeferredWeight(site='{self._name}', shape={tuple(self.shape)})"

    def draw(self) -> Tensor:
        """Return the ordinary tensor."""
        return self.meeting.value(self._name)

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the weight, by which the call is then an ordinary one."""
        self.meeting.happen(application)
        return None


class CountedWeight(WeightPlaceholder):
    """A value that counts the calls it is an argument of.

    Args:
        value: The value.
        use: The record that keeps the count, set to zero here.

    Attributes:
        rows: The numbers of rows that met it in linear maps and look-ups.
        is_indexed: Whether one weight of a stack was used, which may meet any share of the rows.
    """

    _counted: Tensor
    _counts: Counter[int | None]
    rows: set[int]
    is_indexed: bool

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        """Make the tensor that stands for the value."""
        weight = cls._make(value, value.shape, use)
        weight._counted = value
        weight._counts = Counter()
        weight.rows = set()
        weight.is_indexed = False
        use.count = 0
        return weight

    def draw(self) -> Tensor:
        """Return the value, and count; a use that may be repeated or differentiated counts twice."""
        self.add_use(None)
        return self._counted

    def materialize(self) -> Tensor:
        """Return the value, and note that it may be used in the backward pass, so is drawn before."""
        self.use.eager_reason = "a reader of `parameters()`"
        return self.draw()

    def member(self, index: int) -> WeightPlaceholder:
        """Return one weight of a stack, whose uses count apart from those of the others."""
        return _CountedMember(self, index)

    def add_use(self, member: int | None) -> None:
        """Count a use of the whole value, or of one weight of it; of the latter the most used counts."""
        if inside_checkpoint():
            self.use.eager_reason = CHECKPOINT
        self.is_indexed |= member is not None
        self._counts[member] += 2 if _may_be_repeated() else 1
        most = max((count for index, count in self._counts.items() if index is not None), default=0)
        self.use.count = self._counts[None] + most

    def _draw_outputs(self, application: Application) -> None:
        self.rows.add(application.num_examples)

    def _draw_rows(self, lookup: Lookup) -> None:
        self.rows.add(lookup.num_examples)

    def _draw_per_example(self, application: FactorApplication) -> None:
        self.rows.add(application.num_examples)


class _CountedMember(WeightPlaceholder):
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
