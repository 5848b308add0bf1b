"""A lazy bias: what it adds to the outputs, and which of them share it."""

import pytest
import torch
import torch.nn.functional as F

from tests import dense_oracles as dense
from tests.distributions.cases import CASES
from tests.lazy_weights import CONVOLUTIONS, IN, OUT, bias_normal, lazy, narrow_normal
from tests.unit_noise import assert_draws

BY_NAME = {case.name: case for case in CASES}
NAMES = [
    *(("2-tied", bias) for bias in ("mean field", "low rank 2", "full")),
    *((name, bias) for name in ("full", "inducing weights, full") for bias in ("2-tied", "full")),
]
PAIRS = [(BY_NAME[name], BY_NAME[bias]) for name, bias in NAMES]


@pytest.mark.parametrize(
    ("case", "bias_case"), PAIRS, ids=[f"{case.name}, bias {bias.name}" for case, bias in PAIRS]
)
def test_a_lazy_bias_adds_its_distribution_to_the_outputs(case, bias_case):
    """Weight and bias are drawn as outputs: exact for each example, independent over examples."""
    q, prior = case.make((), (OUT, IN), torch.float64), bias_case.make((), (OUT,), torch.float64)
    x = torch.randn(2, IN)
    weight_part = dense.image_covariance(x, case.covariance(q), OUT)
    assert_draws(
        lambda: F.linear(x, lazy(q), lazy(prior, "bias")),
        dense.image_mean(x, q.loc, 2) + prior.loc,
        weight_part + bias_case.covariance(prior),
    )


def layers_with_positions():
    """Return calls that show their bias, with the channels as the second dimension."""

    def linear(x, bias):
        return F.linear(x, lazy(narrow_normal(OUT, 2)), bias).movedim(-1, 1)

    def convolution(dim):
        def call(x, bias):
            kernel = lazy(narrow_normal(OUT, 2, *(1,) * dim))
            return CONVOLUTIONS[dim](x.movedim(-1, 1), kernel, bias)

        return call

    return {"linear, two dimensions": (linear, (3, 2)), "conv2d": (convolution(2), (3, 2))}


LAYERS = layers_with_positions()


@pytest.mark.parametrize(("layer", "space"), LAYERS.values(), ids=LAYERS.keys())
def test_the_positions_of_an_example_share_the_draw_of_the_bias(layer, space):
    prior, x, count = bias_normal(), torch.randn(2, *space, 2), torch.Size(space).numel()
    variance = torch.diag(prior.scale.square())
    assert_draws(
        lambda: layer(x, lazy(prior, "bias")).flatten(2),
        prior.loc.unsqueeze(-1),
        torch.kron(variance, torch.ones(count, count)).expand(2, -1, -1),
    )
    layer(x, bias := lazy(prior, "bias"))
    assert not bias.is_drawn


def test_the_positions_of_an_unbatched_input_share_the_draw_of_the_bias():
    kernel, bias = lazy(narrow_normal(OUT, 2, 1, 1)), lazy(bias_normal(), "bias")
    outputs = F.conv2d(torch.randn(2, 3, 3), kernel, bias)
    assert outputs.shape == (OUT, 3, 3)
    outputs = outputs.flatten(1)
    assert (outputs - outputs[:, :1]).abs().max() < 1e-7
    assert (outputs[:, 0] != bias.distribution.loc).all()
    assert not bias.is_drawn
