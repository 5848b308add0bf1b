"""to_inference_data: sites, functions and outputs in the group `posterior`, and their dimensions."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.posterior.inference_data import dims_of_sites, import_arviz
from tests.models import hierarchical_function, make_classifier, make_regressor, regression_data
from tests.posterior.chains import GROUPS, chains_of, groups_of

az = import_arviz()


def test_sites_are_chosen_by_name_or_pattern():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    data = ps.to_inference_data(model, guide, x, y, 4, sites=["net.0.weight", "*.bias"])
    assert set(data["posterior"]) == {"net.0.weight", "net.0.bias", "net.2.bias"}
    data = ps.to_inference_data(model, guide, x, y, 50, sites=())
    assert groups_of(data) == GROUPS - {"posterior"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few draws for PSIS
        az.loo(data, reff=1.0)


def test_functions_are_of_each_draw_of_all_sites():
    model, (x, y) = make_regressor(), regression_data()
    draws = chains_of(ps.MeanFieldGuide(model, init_scale=0.3))
    functions = {
        "norm": lambda draw: draw["net.0.weight"].norm(),
        "first layer": lambda draw: draw["net.0.weight"] @ x[0] + draw["net.0.bias"],
    }
    group = ps.to_inference_data(model, draws, x, y, sites=(), functions=functions)["posterior"]
    assert set(group) == {*functions}
    weights, biases = (draws[f"net.0.{name}"].detach().numpy() for name in ("weight", "bias"))
    norms = np.linalg.norm(weights, axis=(1, 2)).reshape(2, 3)
    np.testing.assert_allclose(group["norm"].values, norms, rtol=1e-12)
    hidden = np.einsum("soi,i->so", weights, x[0].numpy()) + biases
    np.testing.assert_allclose(group["first layer"].values.reshape(6, 5), hidden, rtol=1e-12)
    assert group["first layer"].dims == ("chain", "draw", "first layer_dim_0")


def returns_two(x, y=None):
    """A hand-written model that returns a tensor with examples and a tensor without."""
    hierarchical_function(x, y)
    return {"first": x, "second": torch.ones(2)}


def test_outputs_of_classes_and_of_several_tensors():
    model, (x, y) = make_classifier(), regression_data()
    labels = torch.randint(4, (12,))
    data = ps.to_inference_data(model, ps.MeanFieldGuide(model), x, labels, 4, outputs=True)
    assert data["posterior"]["outputs"].dims == ("chain", "draw", "obs_id", "outputs_dim_0")
    guide = ps.MeanFieldGuide(returns_two)
    guide.initialize(x, y)
    data = ps.to_inference_data(returns_two, guide, x, y, 4, outputs=True)
    first, second = (data["posterior"][f"outputs.{number}"] for number in (0, 1))
    assert first.dims[2:] == ("obs_id", "outputs.0_dim_0")
    np.testing.assert_array_equal(first.values[0, 3], x)
    assert second.dims[2:] == ("outputs.1_dim_0",)


def call(**options):
    model, (x, y) = make_regressor(), regression_data()
    return ps.to_inference_data(model, ps.MeanFieldGuide(model), x, y, 4, **options)


NEW = "`functions` must have new names, but"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sites": "net.*"}, TypeError, "`sites` must be a Sequence, but got 'net"),
        (
            {"sites": ["*.bias", "net.9.*"]},
            ValueError,
            r"`sites` must be .* of the sites \['net.0.weight', .*, but 'net.9.\*' matches none",
        ),
        ({"functions": {"net.0.bias": len}, "sites": ()}, ValueError, f"{NEW} 'net.0.bias' is a"),
        ({"functions": {"obs": len}}, ValueError, f"{NEW} 'obs' is"),
        ({"functions": {"outputs": len}, "outputs": True}, ValueError, f"{NEW} 'outputs' is"),
        (
            {"functions": {"size": len}},
            TypeError,
            r"`functions\['size'\]\(draw\)` must be a torch.Tensor, but got 4",
        ),
        ({"functions": {"size": 3}}, TypeError, r"`functions\['size'\]` must be a function"),
    ],
)
def test_wrong_choices_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        call(**options)


def test_functions_of_another_shape_or_with_an_error_are_named():
    sizes = iter(range(1, 5))
    with pytest.raises(ValueError, match=r"same shape for each draw, but got \(1,\) and \(2,\)"):
        call(functions={"growing": lambda draw: torch.zeros(next(sizes))})
    with pytest.raises(KeyError) as raised:
        call(functions={"norm": lambda draw: draw["net.0.weigth"].norm()})
    assert raised.value.__notes__[0].startswith(
        "`functions['norm']` was called with a draw of the sites ['net.0.weight', 'net.0.bias'"
    )


def test_a_model_without_outputs_or_with_a_site_of_that_name_is_refused():
    x, y = regression_data()

    def has_site(x, y=None):
        hierarchical_function(x, y)
        return torch.ones(len(x)) * pyro.sample("outputs", dist.Normal(0.0, torch.tensor(1.0)))

    guide = ps.MeanFieldGuide(hierarchical_function)
    guide.initialize(x, y)
    with pytest.raises(TypeError, match=r"`outputs=True` needs a model .* returns NoneType"):
        ps.to_inference_data(hierarchical_function, guide, x, y, 4, outputs=True)
    guide = ps.MeanFieldGuide(has_site)
    guide.initialize(x, y)
    with pytest.raises(ValueError, match="has a site 'outputs', so `outputs` must be False"):
        ps.to_inference_data(has_site, guide, x, y, 4, outputs=True)


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
