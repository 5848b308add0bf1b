"""Walsh-Hadamard layers, compared with the dense weight that their formula gives."""

import math

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from scipy.linalg import hadamard
from torch import nn

import pyro_structvi as ps
from pyro_structvi.nn import WalshHadamardConv1d, WalshHadamardLinear
from pyro_structvi.sites.finding import find_declared_sites
from tests.lazy_weights import run_lazily

SIZES = [(1, 5), (5, 1), (4, 4), (5, 20), (33, 16)]
GEOMETRIES = [
    (1, 2, {"stride": 2, "padding": 1, "dilation": 2}),
    (2, (3, 2), {"stride": (2, 1), "padding": (0, 2)}),
    (2, (2, 3), {"padding": "same", "dilation": (2, 1)}),
    (2, 3, {"padding": "valid", "dilation": 2}),
    (2, (2, 4), {"padding": "same"}),
    (2, (2, 4), {"padding": (1, 2), "padding_mode": "reflect"}),
    (2, (2, 4), {"padding": "same", "padding_mode": "circular"}),
    (3, (1, 2, 3), {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
]


def dense_weight(layer, coefficients):
    """Return the first rows and columns of the stacked S1 H diag(g) H S2."""
    width = coefficients.shape[-1]
    matrix = torch.tensor(hadamard(width), dtype=torch.float64) / math.sqrt(width)
    blocks = [
        row.diag() @ matrix @ g.diag() @ matrix @ column.diag()
        for row, g, column in zip(layer.row_scale, coefficients, layer.column_scale, strict=True)
    ]
    out, size = layer.weight_shape[0], layer.weight_shape[1:].numel()
    return torch.cat(blocks)[:out, :size].reshape(layer.weight_shape).detach()


def spread_diagonals(layer):
    """Move S1 and S2 away from signs, so that all of them count."""
    for diagonal in (layer.row_scale, layer.column_scale):
        diagonal.data.mul_(torch.rand_like(diagonal) + 0.5)
    return layer


def draw_and_run(layer, x):
    trace = poutine.trace(layer).get_trace(x)
    return {name: trace.nodes[name]["value"] for name in ("coefficients", "bias")}, trace


# ---- the weight ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "out"), SIZES)
def test_the_dense_layer_is_that_of_the_formula(size, out):
    layer = spread_diagonals(WalshHadamardLinear(size, out))
    for x in (torch.randn(4, size), torch.randn(size), torch.randn(2, 3, size)):
        values, trace = draw_and_run(layer, x)
        weight = dense_weight(layer, values["coefficients"])
        torch.testing.assert_close(layer.weight(values["coefficients"]), weight)
        expected = F.linear(x, weight, values["bias"])
        torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)
    for x in (torch.randn(4, size), torch.randn(4, 2, 3, size)):
        assert_examples_are_a_loop(layer, x)


def assert_examples_are_a_loop(layer, x):
    coefficients = torch.randn(len(x), *layer.row_scale.shape)
    loop = [layer._outputs(one[None], g)[0] for one, g in zip(x, coefficients, strict=True)]
    torch.testing.assert_close(layer._outputs(x, coefficients), torch.stack(loop))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, of the padding it copies
@pytest.mark.parametrize(("dim", "kernel", "geometry"), GEOMETRIES)
def test_the_convolution_is_that_of_the_formula(dim, kernel, geometry):
    ours, torchs = getattr(ps.nn, f"WalshHadamardConv{dim}d"), getattr(nn, f"Conv{dim}d")
    layer = spread_diagonals(ours(2, 5, kernel, **geometry))
    x, oracle = torch.randn(3, 2, *[5, 6, 7][:dim]), torchs(2, 5, kernel, **geometry)
    values, trace = draw_and_run(layer, x)
    oracle.weight.data = dense_weight(layer, values["coefficients"])
    oracle.bias.data = values["bias"]
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], oracle(x))
    assert_examples_are_a_loop(layer, x)


@pytest.mark.parametrize("arguments", [(WalshHadamardLinear, 3, 9), (WalshHadamardConv1d, 2, 5, 3)])
def test_weights_have_the_prior_scale(arguments):
    """Var(W_ij) = sum_k (dW_ij / dg_k)^2 Var(g_k), with W linear in g."""
    layer = arguments[0](*arguments[1:], prior_scale=0.3)
    scale = find_declared_sites(layer)["coefficients"].prior.stddev
    jacobian = torch.func.jacrev(layer.weight)(torch.zeros_like(scale))
    variance = (jacobian.square() * scale.square()).flatten(-2).sum(-1)
    torch.testing.assert_close(variance.detach(), torch.full(layer.weight_shape, 0.09))


def test_the_start_is_like_torchs():
    layer = WalshHadamardLinear(200, 2000)
    weight = layer.weight(layer.initial_values["coefficients"])
    expected = torch.tensor(1 / 600)  # of U(-1/sqrt(200), 1/sqrt(200))
    torch.testing.assert_close(weight.square().mean(), expected, rtol=0.2, atol=0)
    assert layer.initial_values["bias"].abs().max() <= 200**-0.5
    assert layer.row_scale.abs().eq(1).all()
    assert not layer.row_scale.eq(layer.column_scale).all()


# ---- posteriors of the coefficients --------------------------------------------------------------


def test_one_draw_of_filters_serves_the_batch_unless_asked_and_dense_layers_draw_for_each_example():
    x = torch.randn(1, 2, 5).expand(4, 2, 5)
    for per_example in (False, True):
        layer = WalshHadamardConv1d(2, 3, 2, bias=False, filters_per_example=per_example)
        outputs = run_lazily(layer, ps.MeanFieldGuide(layer, init_scale=1.0), x)
        assert torch.equal(outputs[0], outputs[1]) != per_example
        kind = ps.WalshHadamard(filters_per_example=per_example)
        placed = ps.bayesianize(nn.Conv1d(2, 3, 2), layers={"": kind})
        assert placed.draws_per_example == per_example
    dense = WalshHadamardLinear(2, 6, bias=False)
    outputs = run_lazily(dense, ps.MeanFieldGuide(dense, init_scale=1.0), x[..., 0])
    assert not torch.isclose(outputs[:-1], outputs[1:]).any()


def test_layers_convert():
    layer = WalshHadamardConv1d(2, 5, 3, dtype=torch.float32)
    guide = ps.MeanFieldGuide(layer)
    assert layer(torch.zeros(1, 2, 4, dtype=torch.float32)).dtype == torch.float32
    assert {p.dtype for p in [*guide.parameters(), *layer.parameters()]} == {torch.float32}
    assert layer.double()(torch.zeros(1, 2, 4)).dtype == torch.float64
