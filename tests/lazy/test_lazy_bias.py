"""A lazy bias: what it adds to the outputs, and which of them share it."""

import pytest
import torch
import torch.nn.functional as F

from tests import dense_oracles as dense
from tests.distributions.cases import CASES
from tests.lazy_weights import IN, OUT, bias_normal, lazy, narrow_normal
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


def linear(x, bias):
    """Show a bias, with the channels as the second dimension."""
    return F.linear(x, lazy(narrow_normal(OUT, 2)), bias).movedim(-1, 1)


def convolution(x, bias):
    return F.conv2d(x.movedim(-1, 1), lazy(narrow_normal(OUT, 2, 1, 1)), bias)


def unbatched(x, bias):
    image = x[0].movedim(-1, 0)
    return F.conv2d(image, lazy(narrow_normal(OUT, 2, 1, 1)), bias).unsqueeze(0)


@pytest.mark.parametrize("layer", [linear, convolution, unbatched])
def test_the_positions_of_an_example_share_the_draw_of_the_bias(layer):
    prior, x = bias_normal(), torch.randn(2, 3, 2, 2)
    variance, count = torch.diag(prior.scale.square()), 1 if layer is unbatched else 2
    assert_draws(
        lambda: layer(x, lazy(prior, "bias")).flatten(2),
        prior.loc.unsqueeze(-1),
        torch.kron(variance, torch.ones(6, 6)).expand(count, -1, -1),
    )
    layer(x, bias := lazy(prior, "bias"))
    assert not bias.is_drawn
