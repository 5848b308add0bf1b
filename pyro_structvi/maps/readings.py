"""What a call of torch can be read as: a linear map, a look-up of rows, a function, or other calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_structvi.maps.arrangement import Arrangement
from pyro_structvi.maps.linear_map import LinearMap


class Application(NamedTuple):
    """A call that applies a weight linearly: ``linear_map(x, weight, bias)``.

    With an arrangement, the map takes the weight in that order of its dimensions.
    """

    linear_map: LinearMap
    x: Any
    weight: Any
    bias: Any
    arrangement: Arrangement | None = None

    @property
    def has_positions(self) -> bool:
        """Whether the weight meets one example more than once."""
        return self.linear_map.has_positions(self.x)

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        stack = 0 if self.arrangement is None else self.arrangement.stack
        lead = self.x.dim() - self.linear_map.event_dim(self.x) - stack
        size: int = self.x.shape[:lead].numel()
        return size

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Return a weight as the matrix, or the stack of matrices, that the map takes."""
        if self.arrangement is not None:
            return self.arrangement.matrices(weight)
        return weight.flatten(1)


class Lookup(NamedTuple):
    """A call that looks up rows of a matrix, ``weight[x]`` for integers ``x (batch, *positions)``.

    Rows at ``padding_idx`` get no gradient.
    """

    x: Any
    weight: Any
    padding_idx: int | None

    @property
    def indices(self) -> Tensor:
        """The integers as ``(batch, positions)``; without a batch or positions there is one."""
        indices: Tensor = self.x.reshape(self.x.shape[:1].numel(), self.x.shape[1:].numel())
        return indices

    @property
    def has_positions(self) -> bool:
        """Whether one example looks up several rows."""
        return self.indices.shape[1] > 1

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        return len(self.indices)

    def share_draws(self, rows: Tensor) -> Tensor:
        """Give the same draw to all positions of an example that have the same index.

        Args:
            rows: Drawn rows ``(batch, positions, dim)``, independent where an index repeats.
        """
        indices = self.indices.contiguous()
        values, order = indices.sort()
        first = order.gather(1, torch.searchsorted(values, indices))
        return rows.take_along_dim(first.unsqueeze(-1), 1)

    def shape_outputs(self, rows: Tensor) -> Tensor:
        """Return rows ``(batch, positions, dim)`` as the outputs of the call."""
        outputs = rows.reshape(*self.x.shape, rows.shape[-1])
        if self.padding_idx is None:
            return outputs
        is_padding = self.x == self.padding_idx % len(self.weight)
        return torch.where(is_padding.unsqueeze(-1), outputs.detach(), outputs)


class FactorApplication(NamedTuple):
    """A call of a function of a factor, ``function(x, weight)``, which may have examples in front."""

    function: Callable[[Tensor, Tensor], Tensor]
    x: Any
    weight: Any

    @property
    def num_examples(self) -> int:
        """How many examples the inputs are, as far as their shape tells."""
        return len(self.x)


class Rewrite(NamedTuple):
    """A call that is replaced by ``compute()``, whose own calls meet the weights one by one."""

    compute: Callable[[], Any]


Reading = Application | Lookup | FactorApplication | Rewrite
