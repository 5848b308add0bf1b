"""Placeholders of slices of a joint sample, of deferred samples, and of counted values."""

from collections import Counter
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from pyro_structvi._torch import inside_checkpoint, inside_forward_derivative, inside_transform
from pyro_structvi.maps.calls import Application, FactorApplication, Lookup
from pyro_structvi.maps.linear_map import BiasColumnMap
from pyro_structvi.weights.lazy import LazyWeight, WeightPlaceholder
from pyro_structvi.weights.site_role import CHECKPOINT, SiteUse
from pyro_structvi.weights.weight_distribution import FactoredWeight


class LazySlice(WeightPlaceholder):
    """A weight or its bias, as a slice of a lazily sampled joint weight.

    A linear map with both slices samples its outputs from the image of the joint distribution. Any other
    use takes the slice of a joint sample.

    Args:
        whole: The joint weight, ``(out, in + 1)``.
        shape: The shape of the slice.
        take: Returns the slice of a joint sample.
        use: The use of the slice's site.
    """

    whole: LazyWeight
    _take: Callable[[Tensor], Tensor]

    def __new__(
        cls, whole: LazyWeight, shape: torch.Size, take: Callable[[Tensor], Tensor], use: SiteUse
    ) -> Self:
        """Make the placeholder."""
        piece = cls._make(whole, shape, use)
        piece.whole, piece._take = whole, take
        return piece

    def draw(self) -> Tensor:
        return self._take(self.whole.draw())

    def sample_outputs(self, call: Application | Lookup | FactorApplication) -> Tensor | None:
        """Apply the joint weight if the bias of the call is the other slice."""
        if not isinstance(call, Application) or call.arrangement is not None:
            return None
        linear_map, x, _, bias, _ = call
        has_both = isinstance(bias, LazySlice) and bias.whole is self.whole
        if not has_both or isinstance(x, WeightPlaceholder):
            return None
        if isinstance(self.whole.distribution, FactoredWeight):
            linear_map = BiasColumnMap(linear_map)
        else:
            linear_map, x = linear_map.join_bias(x)
        return self.whole.sample_outputs(Application(linear_map, x, self.whole, None))


class DeferredSample:
    """A joint sample of a weight and its bias that depends on the first inputs of the weight.

    Args:
        name: The site of the weight.
        draw: Returns the values of the sites, by name, for the call that applies the weight.
    """

    def __init__(self, name: str, draw: Callable[[Application], dict[str, Tensor]]) -> None:
        self.name, self._draw = name, draw
        self._values: dict[str, Tensor] | None = None
        self.has_failed = False

    def sample(self, application: Application) -> None:
        """Sample at the first call."""
        if self._values is None:
            self.has_failed = True
            self._values = self._draw(application)
            self.has_failed = False

    def value(self, name: str) -> Tensor:
        """Return the value of a site.

        Raises:
            RuntimeError: If the weight was not applied to an input before.
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
    """A weight or bias of a :class:`DeferredSample`.

    Args:
        sample: The deferred sample.
        name: The site.
        value: A tensor of the same shape, dtype and device.
    """

    sample: DeferredSample
    _name: str

    def __new__(cls, sample: DeferredSample, name: str, value: Tensor) -> Self:
        """Make the placeholder."""
        weight = cls._make(value, value.shape, SiteUse(name))
        weight.sample, weight._name = sample, name
        return weight

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        """Show the site and the shape."""
        return f"DeferredWeight(site='{self._name}', shape={tuple(self.shape)})"

    def draw(self) -> Tensor:
        return self.sample.value(self._name)

    def sample_outputs(self, call: Application | Lookup | FactorApplication) -> None:
        """Sample the weight given the inputs; the call is then an ordinary one."""
        if isinstance(call, Application):
            self.sample.sample(call)


class CountedWeight(WeightPlaceholder):
    """A value that counts the calls it is an argument of, in its use."""

    _value: Tensor
    _counts: Counter[int | None]
    num_examples: set[int]
    is_indexed: bool

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        """Make the placeholder."""
        weight = cls._make(value, value.shape, use)
        weight._value, weight._counts = value, Counter()
        weight.num_examples, weight.is_indexed = set(), False
        use.count = 0
        return weight

    def draw(self) -> Tensor:
        self.add_use(None)
        return self._value

    def materialize(self) -> Tensor:
        """Return the value; it may be used again in the backward pass."""
        self.use.eager_reason = "a reader of `parameters()`"
        return self.draw()

    def item_of_stack(self, index: int) -> WeightPlaceholder:
        """Return one weight of a stack, whose uses are counted separately."""
        return _CountedItem(self, index)

    def add_use(self, index: int | None) -> None:
        """Count a use of the whole value, or of one weight of a stack.

        The total is the number of uses of the weight that is used most. A use that may be repeated or
        differentiated counts twice.
        """
        if inside_checkpoint():
            self.use.eager_reason = CHECKPOINT
        self.is_indexed |= index is not None
        # The counting run has gradients off, unless the model differentiates its own net.
        is_repeated = torch.is_grad_enabled() or inside_transform() or inside_forward_derivative()
        self._counts[index] += 2 if is_repeated else 1
        items = (count for item, count in self._counts.items() if item is not None)
        self.use.count = self._counts[None] + max(items, default=0)

    def sample_outputs(self, call: Application | Lookup | FactorApplication) -> None:
        """Record the number of examples."""
        self.num_examples.add(call.num_examples)


class _CountedItem(WeightPlaceholder):
    """One weight of a counted stack."""

    _stack: CountedWeight
    _index: int

    def __new__(cls, stack: CountedWeight, index: int) -> Self:
        """Make the placeholder."""
        item = cls._make(stack, stack.shape[1:], stack.use)
        item._stack, item._index = stack, index
        return item

    def draw(self) -> Tensor:
        self._stack.add_use(self._index)
        return self._stack._value[self._index]
