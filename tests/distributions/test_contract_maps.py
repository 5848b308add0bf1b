"""The rules that every distribution over a weight obeys: outputs under a linear map, with a bias.

The oracle is ``J Sigma J'`` with the matrix J from ``vec(W)`` to the outputs of an example. Each of its
columns is torch's own layer with a unit weight. Positions share a part of the noise; the rest of the
covariance counts within a position only.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from pyro_structvi.weights.weight_distribution import FactoredWeight
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, make_full, positive
from tests.distributions.subject import (
    FLOAT64,
    Subject,
    assert_gradients_of_draws_are_exact,
)
from tests.unit_noise import assert_draws

OUT = 4


@dataclass(frozen=True)
class Layer:
    """A layer, as an oracle and as a linear map.

    Attributes:
        weight_shape: The shape of its weight, the joined bias apart.
        x_shape: The shape of its input.
        function: Torch's layer, a function of input, weight and bias.
        bias: "none", "known", "random" or "joined"; a joined bias is a last column of the weight.
        options: Of a convolution.
        positions: Whether the dimensions between the first and the last are positions.
    """

    weight_shape: tuple
    x_shape: tuple
    function: Any = F.linear
    bias: str = "random"
    options: dict = field(default_factory=dict)
    positions: bool = True

    @property
    def is_dense(self):
        return self.function is F.linear

    @property
    def event_shape(self):
        """The shape of the weight, with a joined bias."""
        if self.bias != "joined":
            return self.weight_shape
        return OUT, torch.Size(self.weight_shape[1:]).numel() + 1

    def application(self, x, q):
        """Return the linear map and its input, as a weight takes them."""
        if self.is_dense:
            linear_map = DenseMap(positions=self.positions)
        else:
            linear_map = ConvolutionMap(self.function, self.weight_shape[1:], **self.options)
        if self.bias == "joined":
            return (
                (BiasColumnMap(linear_map), x)
                if isinstance(q, FactoredWeight)
                else linear_map.join_bias(x)
            )
        return linear_map, x

    def apply(self, x, weight, bias=None):
        """Apply torch's layer to one weight, with a column for the bias where that is joined."""
        if self.bias == "joined":
            weight, bias = weight[:, :-1].reshape(self.weight_shape), weight[:, -1]
        return self.function(x, weight, bias, **self.options)

    def batch_shape(self, outputs):
        if not self.is_dense:
            return outputs.shape[: outputs.dim() - len(self.weight_shape) + 1]
        return outputs.shape[: 1 if self.positions and outputs.dim() > 1 else -1]

    def operator(self, x):
        """Return J for each example, ``(*batch, E, D)``."""
        units = torch.eye(torch.Size(self.event_shape).numel()).reshape(-1, *self.event_shape)
        columns = torch.stack([self.apply(x, unit) for unit in units], -1)
        batch = self.batch_shape(columns[..., 0])
        return columns.reshape(*batch, -1, len(units))

    def same_position(self, outputs):
        """Return ones where two outputs of an example are at one position, ``(E, E)``."""
        event = outputs.shape[len(self.batch_shape(outputs)) :]
        index = torch.arange(event.numel())
        of = index // OUT if self.is_dense else index % event[1:].numel()
        return (of == of.unsqueeze(-1)).to(FLOAT64)


LAYERS = {
    "dense, one x": Layer((OUT, 3), (3,), bias="known"),
    "dense": Layer((OUT, 3), (2, 3)),
    "dense, positions": Layer((OUT, 3), (2, 2, 3)),
    "dense, a grid": Layer((OUT, 3), (1, 2, 1, 3), bias="none"),
    "dense, no positions": Layer((OUT, 3), (2, 2, 3), positions=False),
    "dense, joined bias": Layer((OUT, 3), (1, 2, 3), bias="joined"),
    "convolution": Layer((OUT, 2, 2), (2, 2, 2), F.conv1d, options={"padding": 1, "stride": 2}),
    "convolution, one x": Layer(
        (OUT, 1, 2, 2), (1, 4, 3), F.conv2d, bias="none", options={"stride": 2}
    ),
    "convolution, joined bias": Layer(
        (OUT, 2, 2), (1, 2, 3), F.conv1d, bias="joined", options={"padding": 1, "dilation": 2}
    ),
    "convolution, known bias": Layer((OUT, 2, 2), (2, 3), F.conv1d, bias="known"),
    "convolution, groups": Layer((OUT, 2, 2), (1, 4, 2), F.conv1d, options={"groups": 2}),
}


def served():
    """Give the layers whose outputs a structure draws in the weight's place.

    All posteriors of inducing weights take the same way: a full one stands for the diagonal ones.
    """
    for name, layer in LAYERS.items():
        for case in CASES:
            has_groups = "groups" in layer.options and not case.serves_groups
            is_served = not has_groups and (layer.is_dense or case.has_convolution_image)
            is_diagonal = case.name.startswith("inducing weights, diagonal")
            if is_served and (name == "convolution" or not is_diagonal):
                yield pytest.param(layer, case, id=f"{name}, {case.name}")


def make_bias(layer):
    """Return a bias, leaves of it, and its mean and variance."""
    loc, scale = torch.randn(OUT).requires_grad_(), positive(OUT, dtype=FLOAT64).requires_grad_()
    if layer.bias == "known":
        return loc, [loc], loc, torch.zeros(OUT)
    if layer.bias == "random":
        return MeanFieldNormal(loc, scale), [loc, scale], loc, scale.square()
    return None, [], torch.zeros(OUT), torch.zeros(OUT)


def outputs_oracle(layer, case, q, x, bias_loc, bias_variance):
    """Return the dense mean ``(*batch, *event)`` and covariance ``(*batch, E, E)`` of the outputs."""
    plain = layer.apply(x, case.mean(q))
    channel = -1 if layer.is_dense else 1 - len(layer.weight_shape)
    mean = (plain.movedim(channel, -1) + bias_loc).movedim(-1, channel)
    operator, covariance = layer.operator(x), case.covariance(q)
    same = layer.same_position(plain)
    shared = covariance if q.has_exact_positions else case.shared_covariance(q)
    whole, common = (operator @ part @ operator.mT for part in (covariance, shared))
    channels = layer_channels(layer, plain)
    of_bias = torch.diag_embed(bias_variance)[channels][:, channels]
    of_bias = of_bias if q.has_exact_positions else of_bias * same
    return mean, common + same * (whole - common) + of_bias


def layer_channels(layer, outputs):
    """Return the channel of each output of an example, ``(E,)``."""
    event = outputs.shape[len(layer.batch_shape(outputs)) :]
    index = torch.arange(event.numel())
    return index % OUT if layer.is_dense else index // event[1:].numel()


def assert_dense_density(subject, image, mean, covariance):
    y, event_dim = torch.randn(mean.shape), len(image.event_shape)
    oracle = dense.log_prob(y, mean, covariance, event_dim)
    subject.assert_close(image.log_prob(y), oracle)
    subject.assert_close(image.entropy(), dense.entropy(covariance))


@pytest.mark.parametrize(("layer", "case"), list(served()))
def test_outputs_have_the_dense_moments_draws_and_gradients(layer, case):
    subject = Subject(case, case.make((), layer.event_shape, FLOAT64))
    x = torch.randn(layer.x_shape).requires_grad_()
    bias, leaves, *moments = make_bias(layer)
    q = subject.with_leaves()
    linear_map, joined = layer.application(x, q)
    assert "outputs" in q.ways_to_apply(linear_map, joined) or "inducing" in case.name
    image = q.image_under(linear_map, joined, bias)
    mean, covariance = outputs_oracle(layer, case, subject.exact(), x, *moments)
    assert image.batch_shape == layer.batch_shape(mean)
    assert image.batch_shape + image.event_shape == mean.shape
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    subject.assert_close(image.mean, mean)
    subject.assert_close(image.variance, diagonal.reshape(mean.shape))
    subject.assert_close(image.covariance_matrix, covariance)
    assert_dense_density(subject, image, mean, covariance)
    found = assert_draws(
        lambda: q.image_under(*layer.application(x, q), bias).rsample(), mean, covariance
    )
    if layer.bias in {"random", "joined"}:  # the others take parts of the same ways
        assert_gradients_of_draws_are_exact(
            subject, found, q, lambda e: outputs_oracle(layer, case, e, x, *moments), [x, *leaves]
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_correlated_bias_is_refused(case):
    q, bias = case.make((), (OUT, 3), FLOAT64), make_full((), (OUT,), FLOAT64)
    with pytest.raises(ValueError, match="`bias` must be a tensor or have independent elements"):
        q.image_under(DenseMap(), torch.randn(5, 3), bias)
