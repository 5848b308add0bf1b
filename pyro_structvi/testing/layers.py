"""Linear maps for a shape of weights, with dense moments of their outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap, LinearMap
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.weights.weight_distribution import FactoredWeight

CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Layer:
    """A linear map with an input and a kind of bias."""

    name: str
    linear_map: LinearMap  # with a joined bias, of the weight without its last column
    x_shape: tuple[int, ...]
    bias: Literal["none", "known", "random", "joined"] = "random"

    def of_weight(self, q: Any, x: Tensor) -> tuple[LinearMap, Tensor]:
        """Return map and input for a distribution of weights."""
        if self.bias != "joined":
            return self.linear_map, x
        if isinstance(q, FactoredWeight):
            return BiasColumnMap(self.linear_map), x
        return self.linear_map.join_bias(x)

    def make_bias(self, out: int) -> tuple[Any, list[Tensor]]:
        """Return a bias as ``image_under`` takes it, and its mean and standard deviation."""
        if self.bias not in {"known", "random"}:
            return None, []
        loc, scale = torch.randn(out).requires_grad_(), (torch.rand(out) + 0.5).requires_grad_()
        return (loc, [loc]) if self.bias == "known" else (MeanFieldNormal(loc, scale), [loc, scale])

    def moments(
        self, mean: Tensor, covariance: Tensor, x: Tensor, bias: list[Tensor]
    ) -> "OutputMoments":
        """Return the dense moments of the outputs, for a weight's matrix of means and covariance."""
        linear_map = BiasColumnMap(self.linear_map) if self.bias == "joined" else self.linear_map
        units = torch.eye(mean.numel()).reshape(-1, *mean.shape)
        columns = torch.stack([linear_map(x, unit) for unit in units], -1)
        outputs = linear_map(x, mean, bias[0] if bias else None)
        batch = outputs.dim() - linear_map.event_dim(outputs)
        operator = columns.flatten(batch, -2)
        event, dim = outputs.shape[batch:], linear_map.channel_dim
        positions = [*event]
        positions.pop(dim)
        position = torch.arange(event.numel() // len(mean)).reshape(positions).unsqueeze(dim)
        channel = torch.arange(len(mean)).reshape(-1, *(1 for _ in range(-1 - dim)))
        channel, position = (part.expand(event).flatten() for part in (channel, position))
        same = position == position.unsqueeze(-1)
        scale = bias[1] if len(bias) == 2 else torch.zeros(len(mean))
        of_bias = scale.square().diag()[channel][:, channel]
        return OutputMoments(outputs, operator @ covariance @ operator.mT, of_bias, same, operator)


@dataclass(frozen=True)
class OutputMoments:
    """Dense moments of outputs, for a batch of examples with events of E elements."""

    mean: Tensor  # in the shape of the outputs
    covariance: Tensor  # (*batch, E, E), for one weight at all positions of an example
    of_bias: Tensor  # the part of a random bias, (E, E)
    same_position: Tensor  # whether two elements have one position, (E, E)
    operator: Tensor  # from vec(W) to the outputs, (*batch, E, D)

    def expected(self, is_exact: bool, shared: Tensor | None, found: Tensor) -> Tensor:
        """Return the covariance of the outputs.

        Unless one weight serves all positions, the covariance between positions is given by the
        covariance of ``shared`` noise, and is not checked without it.
        """
        whole = self.covariance + self.of_bias
        if is_exact:
            return whole
        between = found if shared is None else self.operator @ shared @ self.operator.mT
        return torch.where(self.same_position, whole, between)


def layers_for(event_shape: tuple[int, ...]) -> Iterator[Layer]:
    """Give the layers with a weight of this shape."""
    out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
    if len(event_shape) == 2:
        dense = DenseMap()
        yield Layer("a dense layer, one input", dense, (size,), "known")
        yield Layer("a dense layer", dense, (2, size))
        yield Layer("a dense layer with positions", dense, (2, 2, size))
        yield Layer("a dense layer on a grid", dense, (1, 2, 1, size), "none")
        yield Layer("a dense layer, all independent", DenseMap(positions=False), (2, 2, size))
        if size > 1:
            convolution = ConvolutionMap(F.conv1d, (1, size - 1), padding=1)
            yield Layer("a dense layer with a joined bias", dense, (1, 2, size - 1), "joined")
            yield Layer("a convolution with a joined bias", convolution, (1, 1, size), "joined")
    if len(event_shape) > 2:
        channels, *lengths = kernel = event_shape[1:]
        space = [length + 1 for length in lengths]
        map_of = partial(ConvolutionMap, CONVOLUTIONS[len(lengths)], kernel)
        yield Layer("a convolution", map_of(padding=1, stride=2), (2, channels, *space))
        yield Layer("a convolution, one input", map_of(), (channels, *space), "known")
        if out % 2 == 0:
            grouped = map_of(groups=2)
            yield Layer("a convolution with groups", grouped, (1, 2 * channels, *space))
