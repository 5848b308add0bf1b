"""to_inference_data: groups, names of dimensions and values, and versions of ArviZ."""

import copy
import math
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.distributions.transforms import SigmoidTransform

import pyro_structvi as ps
from pyro_structvi.posterior.inference_data import dims_of_sites, import_arviz, pareto_smoothed
from tests.models import hierarchical_function, make_classifier, make_regressor, regression_data
from tests.posterior.chains import GROUPS, chains_of, groups_of

az = import_arviz()


@pytest.fixture(params=["installed", "1.x"])
def arviz_of_both_versions(request, monkeypatch):
    """Run with the ArviZ that is installed, and with the part of ArviZ 1.x that makes its data."""
    if request.param == "1.x":
        monkeypatch.setitem(sys.modules, "arviz", pytest.importorskip("arviz_base"))


@pytest.mark.usefixtures("arviz_of_both_versions")
def test_groups_dims_and_values():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.KTiedGuide(model, init_scale=0.3)
    draws = chains_of(guide)
    data = ps.to_inference_data(model, draws, x, y, outputs=True)
    assert groups_of(data) == GROUPS
    weight = data["posterior"]["net.0.weight"]
    assert weight.dims == ("chain", "draw", "net.0.weight_out", "net.0.weight_in")
    assert weight.shape == (2, 3, 5, 3)
    np.testing.assert_array_equal(weight.values[1, 0], draws["net.0.weight"][3].detach())
    functions = ps.predict(model, draws, x).functions
    expected = torch.distributions.Normal(functions, 0.3).log_prob(y).sum(-1).reshape(2, 3, 12)
    np.testing.assert_allclose(data["log_likelihood"]["obs"].values, expected.numpy())
    outputs = data["posterior"]["outputs"]
    np.testing.assert_allclose(outputs.values, functions.reshape(2, 3, 12), rtol=1e-12)
    predictive, observed = data["posterior_predictive"]["obs"], data["observed_data"]["obs"]
    np.testing.assert_array_equal(observed.values, y[:, 0].numpy())
    assert observed.dims == ("obs_id",)
    assert predictive.shape == (2, 3, 12)
    assert len(np.unique(predictive)) == predictive.size
    assert predictive.dims == outputs.dims == ("chain", "draw", *observed.dims)
    assert data["log_likelihood"]["obs"].dims == ("chain", "draw", "obs_id")
    np.testing.assert_array_equal(observed["obs_id"], np.arange(12))


@pytest.mark.parametrize("make_model", [make_regressor, make_classifier])
def test_arviz_accepts_it(make_model):
    model, (x, y) = make_model(), regression_data()
    y = y if make_model is make_regressor else torch.randint(4, (12,))
    mean_field, k_tied = (
        ps.to_inference_data(model, guide(model, init_scale=0.01), x, y, num_samples=50)
        for guide in (ps.MeanFieldGuide, ps.KTiedGuide)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one chain; few draws for PSIS
        assert len(az.summary(mean_field)) == sum(
            value[0, 0].size for value in mean_field["posterior"].values()
        )
        table = az.compare({"mean field": mean_field, "k-tied": k_tied})
    assert set(table.index) == {"mean field", "k-tied"}
    assert np.isfinite(table["elpd_loo" if "elpd_loo" in table else "elpd"]).all()


# ---- data of other forms -------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, first, second):
        return self.left(first) + self.right(second)


@pytest.mark.parametrize("size", [2, 12])
def test_inputs_by_keyword(size):
    """With two examples a mapping of two inputs has as many entries as there are examples."""
    model = ps.Regressor(ps.bayesianize(TwoInputs(), prior=1.0), size, 0.3)
    x = {"first": torch.randn(size, 3), "second": torch.randn(size, 2)}
    y = torch.randn(size, 1)
    draws = chains_of(ps.MeanFieldGuide(model))
    data = ps.to_inference_data(model, draws, x, y, outputs=True)
    expected = sum(
        torch.einsum("ni,soi->sno", x[key], draws[f"net.{name}.weight"])
        + draws[f"net.{name}.bias"][:, None]
        for key, name in (("first", "left"), ("second", "right"))
    )
    found = data["posterior"]["outputs"].values.reshape(6, size, 1)
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-10, atol=1e-12)


def test_padded_tokens_are_padded_in_predictive_draws_too():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))
    model = ps.TokenClassifier(ps.bayesianize(net, prior=1.0), 6)
    x, y = torch.randint(7, (6, 3)), torch.randint(5, (6, 3))
    y[0, 1:] = -100
    draws = chains_of(ps.MeanFieldGuide(model, init_scale=0.3), 20)
    data = ps.to_inference_data(model, draws, x, y)
    drawn = data["posterior_predictive"]["obs"].values.reshape(20, 6, 3)
    padded = y.numpy() == -100
    assert (drawn[:, padded] == -100).all()
    assert set(np.unique(drawn[:, ~padded])) == {0, 1, 2, 3, 4}
    prediction = ps.predict(model, draws, x, y=y)
    assert prediction.mean.shape == (6, 3, 5)
    tokens = prediction.functions.log_softmax(-1)
    nats = tokens.gather(-1, y.clamp_min(0).expand(20, 6, 3).unsqueeze(-1)).squeeze(-1)
    nats = (nats * (y != -100)).sum(-1)
    found = data["log_likelihood"]["obs"].values.reshape(20, 6)
    np.testing.assert_allclose(found, nats.detach(), rtol=1e-10)
    torch.testing.assert_close(
        prediction.log_density, nats.logsumexp(0) - math.log(20), rtol=1e-9, atol=1e-12
    )
    with pytest.raises(ValueError, match="`y` must be in"):  # no padding
        ps.to_inference_data(model, draws, x, torch.full((6, 3), 5))


@pytest.mark.parametrize("where", ["around", "inside"])
def test_masked_observations_have_the_log_likelihood_zero(where):
    """Those of the model, whose mask may lie around it or in it; `predict` scores them likewise."""
    inner, (x, y) = make_regressor(), regression_data()
    mask = torch.arange(12) < 9

    def inside(x, y=None):
        with poutine.mask(mask=mask):
            return inner(x, y)

    model = poutine.mask(inner, mask=mask) if where == "around" else inside
    draws = chains_of(ps.MeanFieldGuide(inner, init_scale=0.3))
    masked, whole = (
        ps.to_inference_data(each, draws, x, y)["log_likelihood"]["obs"].values
        for each in (model, inner)
    )
    np.testing.assert_allclose(masked, whole * mask.numpy(), rtol=1e-12)
    density = ps.predict(model, draws, x, y=y).log_density
    expected = np.log(np.exp(masked).mean((0, 1)))
    np.testing.assert_allclose(density.detach(), expected, rtol=1e-10, atol=1e-12)


def test_values_are_copies_in_float64_and_several_outputs_keep_their_dimension():
    net = nn.Linear(3, 2).float()
    model = ps.Regressor(ps.bayesianize(net), num_data=12, noise_scale=0.3)
    x, y = torch.randn(12, 3).float(), torch.randn(12, 2).float().requires_grad_()
    data = ps.to_inference_data(model, ps.MeanFieldGuide(model), x, y, num_samples=4, outputs=True)
    expected = y.detach().clone()
    y.data.zero_()
    assert data["posterior"]["net.weight"].dtype == np.float64
    assert data["observed_data"]["obs"].dtype == np.float64
    np.testing.assert_array_equal(data["observed_data"]["obs"].values, expected)
    for group, name in (("posterior_predictive", "obs"), ("posterior", "outputs")):
        assert data[group][name].dims == ("chain", "draw", "obs_id", "obs_dim_0")
    model, (x, y) = make_regressor(), regression_data()
    draws = chains_of(ps.MeanFieldGuide(model))
    with pytest.raises(ValueError, match="multiple of the 2 chains, but got 3"):
        ps.to_inference_data(model, draws, x, y, num_samples=3)


def test_counts_are_whole_numbers():
    counts = torch.arange(12.0).unsqueeze(-1)
    for make, y in ((ps.PoissonRegressor, counts), (ps.BinaryClassifier, counts % 2)):
        model = make(ps.bayesianize(nn.Linear(3, 1), prior=1.0), 12)
        data = ps.to_inference_data(model, ps.MeanFieldGuide(model), torch.randn(12, 3), y, 4)
        for group in ("observed_data", "posterior_predictive"):
            assert data[group]["obs"].dtype == np.int64
        np.testing.assert_array_equal(data["observed_data"]["obs"], y[:, 0])
        assert data["log_likelihood"]["obs"].dtype == np.float64


# ---- statistics of a sampler ---------------------------------------------------------------------


def sampled_chains():
    model = make_regressor()
    draws = chains_of(ps.MeanFieldGuide(model, init_scale=0.3), 40)
    draws.sample_stats = {
        "energy": np.random.default_rng(0).standard_normal((2, 20)),
        "diverging": np.arange(40).reshape(2, 20) % 7 == 0,
    }
    return model, draws


@pytest.mark.usefixtures("arviz_of_both_versions")
def test_statistics_are_those_of_the_draws_that_are_taken():
    (model, draws), (x, y) = sampled_chains(), regression_data()
    draws.sample_stats["lp"] = draws["net.2.bias"].detach().numpy().reshape(2, 20)
    for count in (None, 40, 14, 4):
        data = ps.to_inference_data(model, draws, x, y, count)
        stats, bias = data["sample_stats"], data["posterior"]["net.2.bias"]
        assert stats["lp"].dims == ("chain", "draw")
        np.testing.assert_array_equal(stats["lp"].values, bias.values[..., 0])
    assert stats["diverging"].dtype == bool


def test_it_survives_a_file(tmp_path):
    (model, draws), (x, y) = sampled_chains(), regression_data()
    data = ps.to_inference_data(model, draws, x, y, 8)
    data.to_netcdf(tmp_path / "chains.nc")
    loaded = az.from_netcdf(tmp_path / "chains.nc")
    for group, name in (("posterior", "net.0.weight"), ("sample_stats", "diverging")):
        np.testing.assert_array_equal(loaded[group][name], data[group][name])
        assert loaded[group][name].dtype == data[group][name].dtype


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


NEW = "`functions` and `outputs` must have new names, but"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"sites": ["*.bias", "net.9.*"]},
            ValueError,
            r"pattern 'net.9.\*' of `sites` matches none of the sites \['net.0.weight', ",
        ),
        ({"functions": {"net.0.bias": len}, "sites": ()}, ValueError, f"{NEW} 'net.0.bias' is a"),
        ({"functions": {"obs": len}}, ValueError, f"{NEW} 'obs' is"),
        ({"functions": {"outputs": len}, "outputs": True}, ValueError, f"{NEW} 'outputs' is"),
        (
            {"functions": {"size": len}},
            TypeError,
            r"`functions\['size'\]\(draw\)` must be a torch.Tensor, but got 4",
        ),
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
    with pytest.raises(ValueError, match=f"{NEW} 'outputs' is a site"):
        ps.to_inference_data(has_site, guide, x, y, 4, outputs=True)


OF_RNN = dict.fromkeys(("weight_ih_l0", "weight_hh_l0"), "out in")
OF_RNN |= dict.fromkeys(("bias_ih_l0", "bias_hh_l0"), "out")
LAYERS = [
    (nn.Linear(3, 5), {"weight": "out in", "bias": "out"}),
    (nn.Conv2d(3, 5, 2, bias=False), {"weight": "out in kernel_0 kernel_1"}),
    (nn.ConvTranspose1d(3, 5, 2, bias=False), {"weight": "in out kernel"}),
    (nn.Embedding(7, 4), {"weight": "in out"}),
    (nn.Bilinear(2, 3, 4, bias=False), {"weight": "out in_0 in_1"}),
    (nn.LayerNorm(5), {"weight": "out", "bias": "out"}),
    (nn.RNN(3, 4), OF_RNN),
    (
        nn.MultiheadAttention(4, 2, bias=False),
        {"in_proj_weight": "out in", "out_proj.weight": "out in"},
    ),
    (
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 5, bias=False)),
        {f"parametrizations.weight.original{number}": "out in" for number in (0, 1)},
    ),
]


def test_dims_are_named_by_what_they_count():
    for layer, expected in LAYERS:
        shapes = {f"net.0.{key}": value.shape for key, value in layer.named_parameters()}
        net = ps.bayesianize(nn.Sequential(layer), prior=1.0, normalization=True)
        model = poutine.scale(ps.Regressor(net, 5, 0.1), scale=2.0)
        assert dims_of_sites(model, shapes) == {
            f"net.0.{key}": [f"net.0.{key}_{kind}" for kind in kinds.split()]
            for key, kinds in expected.items()
        }
    # Of a function, each net.
    layer, kinds = LAYERS[-1]
    nets = [ps.bayesianize(nn.ModuleDict({name: copy.deepcopy(layer)}), prior=1.0) for name in "ab"]
    shapes = {f"{name}.{key}": (5, 3) for name in "ab" for key in kinds}
    expected = {key: [f"{key}_out", f"{key}_in"] for key in shapes}
    assert dims_of_sites(lambda x: [net(x) for net in nets], shapes) == expected
    # Those of factors and of undeclared sites are left to ArviZ.
    net = nn.Sequential(nn.Linear(8, 8, bias=False))
    model = ps.Regressor(ps.bayesianize(net, layers={"0": ps.WalshHadamard()}), 5, 0.1)
    assert dims_of_sites(model, {"net.0.coefficients": (8,)}) == {}
    assert dims_of_sites(hierarchical_function, {"scale": (), "weight": (1, 3)}) == {}


def test_arviz_announces_itself_to_those_who_import_it_only(tmp_path, monkeypatch):
    """In a fake module, since the announcement is made once a day; other warnings are not hidden."""
    folder = tmp_path / "arviz"
    folder.mkdir()
    notice = 'import warnings\nwarnings.warn("\\nArviZ is undergoing a refactor", FutureWarning)\n'
    monkeypatch.syspath_prepend(tmp_path)

    def import_again(function):
        monkeypatch.delitem(sys.modules, "arviz", raising=False)
        return function()

    (folder / "__init__.py").write_text(notice)
    assert import_again(import_arviz).__file__ == str(folder / "__init__.py")
    with pytest.warns(FutureWarning, match="undergoing"):
        import_again(lambda: __import__("arviz"))
    (folder / "__init__.py").write_text(notice.replace("is undergoing", "drops what you use in"))
    with pytest.warns(FutureWarning, match="drops what you use"):
        import_again(import_arviz)


def test_where_arviz_is_missing_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r'pip install "pyro-structvi\[diagnostics\]"'):
        import_arviz()


@pytest.mark.parametrize("sign", [1, -1])
def test_version_1_takes_minus_the_log_weights(sign, monkeypatch):
    """Fake modules return their argument; the function of version 1 is in another package."""
    function, nothing = SimpleNamespace(psislw=lambda values: (values, 0.5)), SimpleNamespace()
    base = SimpleNamespace(array_stats=function if sign == -1 else nothing)
    monkeypatch.setitem(sys.modules, "arviz", function if sign == 1 else nothing)
    monkeypatch.setitem(sys.modules, "arviz_stats", SimpleNamespace(base=base))
    monkeypatch.setitem(sys.modules, "arviz_stats.base", base)
    log_weights = np.arange(4.0)
    given, k_hat = pareto_smoothed(log_weights)
    np.testing.assert_array_equal(given, sign * log_weights)
    assert k_hat == 0.5


@pytest.mark.parametrize("version", ["installed", "1.x"])
def test_the_tail_of_a_pareto_distribution_has_its_shape(version, monkeypatch):
    """The quantiles are like the largest of many draws, without noise."""
    if version == "1.x":
        pytest.importorskip("arviz_stats")
        monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace())
    shares = (np.arange(4000) + 0.5) / 4000
    smoothed, k_hat = pareto_smoothed(-0.6 * np.log1p(-shares))
    assert k_hat == pytest.approx(0.6, abs=0.03)
    assert np.exp(smoothed).sum() == pytest.approx(1.0)


def test_a_joint_density_of_all_examples_is_one_value():
    """``predict`` has the same density of all observations together."""

    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.MultivariateNormal(x @ weight, torch.eye(3) + 0.5), obs=y)

    x, y, draws = torch.randn(3, 2), torch.randn(3), {"weight": torch.randn(4, 2)}
    found = ps.to_inference_data(model, draws, x, y)["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw")
    density = torch.as_tensor(found.values).flatten().logsumexp(0) - math.log(4)
    torch.testing.assert_close(density, ps.predict(model, draws, x, y=y).log_density)


def test_a_likelihood_needs_no_mean_in_closed_form():
    def likelihood(mean):
        return dist.TransformedDistribution(dist.Normal(mean, 1.0), [SigmoidTransform()])

    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", likelihood(x @ weight), obs=y)

    x, y, draws = torch.randn(3, 2), torch.rand(3), {"weight": torch.randn(4, 2)}
    found = ps.to_inference_data(model, draws, x, y)["log_likelihood"]["y"].values[0]
    expected = likelihood(draws["weight"] @ x.mT).log_prob(y)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(ValueError, match=r"`y` must have the dtype of `prediction.mean`"):
        ps.to_inference_data(model, draws, x, y.float())


class HasMissing(PyroModule):
    """A model that samples what is missing among the observations, where it has any."""

    def __init__(self):
        super().__init__()
        self.net = ps.bayesianize(nn.Linear(3, 1))

    def forward(self, x, y=None, seen=None):
        mean = self.net(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, 0.5), obs=y, obs_mask=seen)
        return mean


@pytest.mark.parametrize("size", [6, 4])
def test_missing_observations_are_no_part_of_predictions(size):
    model, x, y = HasMissing(), torch.randn(6, 3), torch.randn(6)
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    guide.initialize(x, y, torch.arange(6) < 4)
    assert guide.local_site_names == ["obs_unobserved"]
    x, y = x[:size], y[:size]
    found = ps.to_inference_data(model, guide, x, y, 5, outputs=True)["posterior"]
    assert {*found} == {"net.weight", "net.bias", "outputs"}
    weight, bias = found["net.weight"].values[0], found["net.bias"].values[0]
    expected = weight[:, 0] @ x.numpy().T + bias
    np.testing.assert_allclose(found["outputs"].values[0], expected, rtol=1e-10)
    assert ps.predict(model, guide, x, num_samples=5, batch_size=4).functions.shape == (5, size)
