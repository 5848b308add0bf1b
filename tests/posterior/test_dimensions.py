"""Names of the dimensions of weights, by the layer that declares them."""

import pyro.poutine as poutine
import pytest
from torch import nn

import pyro_structvi as ps
from pyro_structvi.posterior.inference_data import dims_like, dims_of_sites
from tests.models import hierarchical_function

LAYERS = {
    "linear": (nn.Linear(3, 5), {"weight": "out in", "bias": "out"}),
    "in 2D": (nn.Conv2d(3, 5, 2, bias=False), {"weight": "out in kernel_0 kernel_1"}),
    "transposed": (nn.ConvTranspose1d(3, 5, 2, bias=False), {"weight": "in out kernel"}),
    "embedding": (nn.Embedding(7, 4), {"weight": "in out"}),
    "bilinear": (nn.Bilinear(2, 3, 4, bias=False), {"weight": "out in_0 in_1"}),
    "normalization": (nn.LayerNorm(5), {"weight": "out", "bias": "out"}),
    "recurrent": (
        nn.RNN(3, 4),
        {
            "weight_ih_l0": "out in",
            "weight_hh_l0": "out in",
            "bias_ih_l0": "out",
            "bias_hh_l0": "out",
        },
    ),
    "attention": (
        nn.MultiheadAttention(4, 2, bias=False),
        {"in_proj_weight": "out in", "out_proj.weight": "out in"},
    ),
    "parametrized": (
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 5, bias=False)),
        {
            "parametrizations.weight.original0": "out in",
            "parametrizations.weight.original1": "out in",
        },
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_dims_are_named_by_what_they_count(name):
    layer, expected = LAYERS[name]
    shapes = {f"net.0.{key}": value.shape for key, value in layer.named_parameters()}
    net = ps.bayesianize(nn.Sequential(layer), prior=1.0, normalization=True)
    model = poutine.scale(ps.Regressor(net, 5, 0.1), scale=2.0)
    assert dims_of_sites(model, shapes) == {
        f"net.0.{key}": [f"net.0.{key}_{kind}" for kind in kinds.split()]
        for key, kinds in expected.items()
    }


def test_dims_of_factors_and_of_undeclared_sites_are_left_to_arviz():
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    model = ps.Regressor(ps.bayesianize(net, layers={"0": ps.WalshHadamard()}), 5, 0.1)
    assert dims_of_sites(model, {"net.0.coefficients": (8,)}) == {}
    assert dims_of_sites(hierarchical_function, {"scale": (), "weight": (1, 3)}) == {}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 4), ["obs_id", "obs_dim_0"]),
        ((12, 3), ["obs_id", "a_dim_0"]),
        ((3, 4), ["a_dim_0", "a_dim_1"]),
        ((), []),
    ],
)
def test_dims_like_others_are_shared_for_as_long_as_sizes_agree(shape, expected):
    assert dims_like("a", shape, ["obs_id", "obs_dim_0"], (12, 4)) == expected
