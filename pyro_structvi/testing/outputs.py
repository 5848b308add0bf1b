"""Rules for the outputs of layers with random weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.maps import Arrangement, BiasColumnMap, ConvolutionMap, DenseMap, LinearMap
from pyro_structvi.maps.convolution import TransposedConvolutionMap
from pyro_structvi.moments.linear import with_column
from pyro_structvi.testing.noise import draw_with_noise
from pyro_structvi.testing.weights import MOST_DRAWS, Subject, dense_of_batch, has_image
from pyro_structvi.weights.weight_distribution import FactoredWeight


def check_image(given: Subject) -> None:
    """Check ``image`` against the dense distribution of W x."""
    s, q = given, given.q
    if not has_image(q):
        return
    matrix, covariance = s.matrices
    out, size = matrix.shape[-2:]
    ones = tuple(1 for _ in q.batch_shape)
    for lead in ((2, *ones), (2, *q.batch_shape)) if ones else ((), (3,)):
        x = torch.randn(*lead, size).requires_grad_()
        mean = (matrix * x.unsqueeze(-2)).sum(-1)
        of_outputs = torch.einsum("...iajb,...a,...b->...ij", covariance, x, x)
        image, s = q.image(x), given.with_leaf("x", x)
        shapes = image.batch_shape + image.event_shape, image.event_shape
        s.equal("`image(x)` has the event (out,)", shapes, (mean.shape, torch.Size([out])))
        for compare in (s.compare, s.compare_densities):
            compare("{} of `image(x)` agrees with W x", image, mean, of_outputs)
        if ones:
            rule = "weights of a batch have independent outputs under a layer, without positions"
            s.close(rule, q.image_under(DenseMap(), x).covariance_matrix, of_outputs)
    s.compare_draws("draws of `image(x)`", lambda: q.image(x).rsample(), mean, of_outputs)
    if not ones:
        several = of_outputs.expand(4, *of_outputs.shape)
        draws = lambda: q.image(x).rsample((2, 2)).flatten(0, 1)  # noqa: E731
        name = "several draws of `image(x)`"
        s.compare_draws(name, draws, mean.expand(4, *mean.shape), several)
    if not s.is_normal:
        _check_marginals(s, q, x, mean)
    for sample_shape in ((5,), (2, 5)):
        got = tuple(image.rsample(torch.Size(sample_shape)).shape)
        s.equal("draws of `image(x)` have their shape", got, (*sample_shape, *mean.shape))
    zero = torch.zeros_like(x).requires_grad_()
    inputs = [zero, *(leaf.value for leaf in given.leaves)]
    drawn = q.image(zero).rsample()
    found = torch.autograd.grad(drawn.sum(), inputs, retain_graph=True, materialize_grads=True)
    finite = all(bool(gradient.isfinite().all()) for gradient in found)
    s.equal("`image` of zeros has finite gradients", finite, True)
    s.close("`image` of zeros is zero", drawn / 1e6, torch.zeros_like(drawn), False)
    for kind, wrong, start in (
        ("size", torch.zeros(7, size + 1), f"`x` must have shape (*batch, in) with in = {size}"),
        ("dtype", x.float(), "`x` must have the dtype of"),
    ):
        s.refuses(f"`image` refuses another {kind}", partial(q.image, wrong), start)


@torch.no_grad()
def _check_marginals(s: Subject, q: Any, x: Tensor, mean: Tensor) -> None:
    """Compare characteristic functions of outputs, as of a normal with the moments of heavy tails."""
    many = torch.Size([MOST_DRAWS])
    outputs = q.as_matrix(q.rsample(many)).unsqueeze(1) @ x.unsqueeze(-1)
    drawn = q.image(x).rsample(many), outputs.squeeze(-1)
    own, other = ((draws - mean) / drawn[1].std(0) for draws in drawn)
    waves = [torch.stack([(2 * y).cos(), y.cos(), y.sin()], 1) for y in (own, other)]
    rule = "draws of `image(x)` have the marginal distributions of W x"
    s.mean_of(rule, waves[0] - waves[1], 0 * waves[0][0])


def check_spread(s: Subject) -> None:
    """Check ``spread`` against the dense covariance."""
    if s.q.batch_shape:
        return
    _, covariance = s.matrices
    for batch in ((), (3,)):
        root = torch.randn(*batch, covariance.shape[-1], covariance.shape[-1])
        root[..., 0] = 0  # without an inverse
        moment = root @ root.mT
        expected = torch.einsum("iajb,...ab->...ij", covariance, moment)
        s.close("`spread(S)` is E[(W - M) S (W - M)']", s.q.spread(moment), expected)


def check_rows(s: Subject) -> None:
    """Check moments and draws of ``rows``, if defined."""
    if s.q.batch_shape or s.event_dim != 2:
        return
    out, size = s.q.event_shape
    index = torch.tensor([[0, out - 1, 0], [1 % out, 0, 0]])
    rows = s.q.rows(index)
    if rows is None:
        return
    s.close("`rows(index)` has the means of the rows", rows.mean, s.mean[index])
    own = s.covariance.reshape(out, size, out, size)[index, :, index]
    variance = own.diagonal(dim1=-2, dim2=-1)
    s.close("`rows(index)` has the variances of the rows", rows.variance, variance)
    whole = rows.covariance_matrix  # its entries between positions are those of shared noise
    blocks = whole.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    blocks = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    s.close("`rows(index)` has the covariances of the rows", blocks, own)
    s.compare_draws("draws of `rows(index)`", lambda: s.q.rows(index).rsample(), rows.mean, whole)


def check_rearranged(s: Subject) -> None:
    """Check ``rearranged``, if defined, for a transpose and for a stack of matrices."""
    shape = s.q.event_shape
    if s.q.batch_shape or len(shape) < 2:
        return
    arrangements = [Arrangement.transposed(tuple(shape))]
    if len(shape) > 2:
        dims = (0, 2, 1, *range(3, len(shape)))
        arrangements.append(Arrangement.of_dims(dims, tuple(shape), stack=1))
    for arrangement in arrangements:
        found = s.q.rearranged(arrangement)
        if found is None:
            continue
        rule = f"`rearranged({arrangement})`"
        shapes = found.batch_shape, found.event_shape
        s.equal(f"{rule} has the shapes of stack and weight", shapes, arrangement.split_shape)
        order = arrangement(torch.arange(shape.numel()).reshape(shape)).flatten()
        s.close(f"{rule} has the mean in another order", found.mean, arrangement(s.mean))
        covariance, expected = found.covariance_matrix, s.covariance[order][:, order]
        whole = dense_of_batch(covariance)
        s.close(f"{rule} has the covariance in another order", whole, expected)
        s.compare_draws(f"draws of {rule}", found.rsample, found.mean, covariance)


def check_layers(s: Subject) -> None:
    """Check the outputs of all layers for the shape of the weight."""
    if not s.q.batch_shape:
        for layer in layers_for(tuple(s.q.event_shape)):
            _check_layer(s, layer)


@dataclass(frozen=True)
class Layer:
    """A linear map with an input and a kind of bias."""

    name: str
    linear_map: LinearMap  # with a joined bias, of the weight without its last column
    x_shape: tuple[int, ...]
    bias: Literal["none", "known", "joined"] = "known"

    def of_weight(self, q: Any, x: Tensor) -> tuple[LinearMap, Tensor]:
        """Return map and input for a distribution of weights."""
        return with_column(q, self.linear_map, x, self.bias == "joined")

    def operator(self, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the mean, and the map from vec(W) to them, ``(*batch, E, D)``."""
        linear_map = BiasColumnMap(self.linear_map) if self.bias == "joined" else self.linear_map
        units = torch.eye(mean.numel()).reshape(-1, *mean.shape)
        columns = torch.stack([linear_map(x, unit) for unit in units], -1)
        outputs = linear_map(x, mean)
        return outputs, columns.flatten(outputs.dim() - linear_map.event_dim(outputs), -2)

    def places(self, outputs: Tensor, out: int) -> tuple[Tensor, Tensor]:
        """Return the channel and the position of each of the E elements of an event."""
        event = outputs.shape[-self.linear_map.event_dim(outputs) :]
        numbers = torch.arange(event.numel()).reshape(event)
        rank = numbers.movedim(self.linear_map.channel_dim, 0).flatten().argsort()
        return rank // (event.numel() // out), rank % (event.numel() // out)


def _check_layer(given: Subject, layer: Layer) -> None:
    """Check moments, density and draws of a layer's outputs, in each way that the weight offers."""
    q, name = given.q, layer.name
    matrix, _ = given.matrices
    out = len(matrix)
    x = torch.randn(layer.x_shape).requires_grad_()
    s = given.with_leaf("x", x)
    linear_map, seen = layer.of_weight(q, x)
    ways = q.ways_to_apply(linear_map, seen)
    s.equal(f"`ways_to_apply` offers a drawn weight to {name}", "weight" in ways, True)
    mean, operator = layer.operator(x, matrix)
    covariance = operator @ s.covariance @ operator.mT  # of one weight at all positions
    found = q.image_variance(linear_map, seen, mean)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
    s.close(f"`image_variance` is the variance of {name}", found, diagonal)
    if s.is_normal and isinstance(q, FactoredWeight) and linear_map.groups == 1:
        _, size = draw_with_noise(q.rsample, None)
        noise = torch.randn(size)
        weight, _ = draw_with_noise(q.rsample, noise)
        applied, _ = draw_with_noise(lambda: q.draw_factored().apply(linear_map, seen), noise)
        expected = linear_map(seen, q.as_matrix(weight))
        s.close(f"`draw_factored` applies one draw in {name}", applied, expected)
    if "outputs" not in ways:
        return
    channel, position = layer.places(mean, out)
    bias = torch.randn(out).requires_grad_() if layer.bias == "known" else None
    if bias is not None:
        s = s.with_leaf("bias", bias)
        mean = mean + bias[channel].reshape(mean.shape[mean.dim() - linear_map.event_dim(mean) :])
    image = q.image_under(linear_map, seen, bias)
    found_shape = image.batch_shape + image.event_shape
    s.equal(f"the outputs of {name} have their shape", found_shape, mean.shape)
    if not q.has_exact_positions:  # the covariance between positions is that of shared noise
        between = image.covariance_matrix
        if s.shared is not None:
            between = operator @ s.shared @ operator.mT
        covariance = torch.where(position == position.unsqueeze(-1), covariance, between)
    rule = f"{{}} of {name} agrees with the weight"
    s.compare(rule, image, mean, covariance)
    if torch.linalg.matrix_rank(operator.detach()).eq(operator.shape[-2]).all():
        # Outputs of fewer weights, as at two positions of a single input, have no density.
        s.compare_densities(rule, image, mean, covariance)
    draw = lambda: q.image_under(*layer.of_weight(q, x), bias).rsample()  # noqa: E731
    s.compare_draws(f"drawn outputs of {name}", draw, mean, covariance)


def layers_for(event_shape: tuple[int, ...]) -> Iterator[Layer]:
    """Give the layers with a weight of this shape."""
    out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
    if len(event_shape) == 2:
        dense = DenseMap()
        yield Layer("a dense layer, one input", dense, (size,))
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
        function = getattr(F, f"conv{len(lengths)}d")
        map_of = partial(ConvolutionMap, function, kernel)
        padding = tuple(min(1, length - 1) for length in lengths)
        yield Layer("a convolution", map_of(padding=padding, stride=2), (2, channels, *space))
        dilated = map_of(padding=tuple(length - 1 for length in lengths), dilation=2)
        yield Layer("a dilated convolution, one input", dilated, (channels, *space))
        function = getattr(F, f"conv_transpose{len(lengths)}d")
        transposed = TransposedConvolutionMap(function, kernel, stride=2, padding=padding)
        yield Layer("a transposed convolution", transposed, (1, channels, *lengths))
        if out % 2 == 0:
            grouped = map_of(groups=2)
            yield Layer("a convolution with groups", grouped, (1, 2 * channels, *space))
