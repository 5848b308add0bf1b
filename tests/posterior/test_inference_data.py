"""to_inference_data: groups, names of dimensions and values, and what ArviZ makes of them."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pyro.poutine as poutine
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.posterior.inference_data import import_arviz
from tests.models import make_classifier, make_regressor, regression_data
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


def test_arviz_1_gets_groups_in_one_mapping(monkeypatch):
    """A fake module with its signature, so that this path runs without ArviZ 1.x."""

    def from_dict(data, *, dims=None, coords=None):
        return data, dims, coords

    monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace(from_dict=from_dict))
    model, (x, y) = make_regressor(), regression_data()
    groups, dims, coords = ps.to_inference_data(
        model, ps.MeanFieldGuide(model), x, y, 4, sites=["*.2.bias"]
    )
    assert set(groups) == GROUPS
    assert {name: value.shape for name, value in groups["posterior"].items()} == {
        "net.2.bias": (1, 4, 1)
    }
    assert dims == {"net.2.bias": ["net.2.bias_out"], "obs": ["obs_id"]}
    assert coords["obs_id"].tolist() == [*range(12)]


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


def test_it_survives_a_file(tmp_path):
    (model, draws), (x, y) = sampled_chains(), regression_data()
    data = ps.to_inference_data(model, draws, x, y, 8)
    data.to_netcdf(tmp_path / "chains.nc")
    loaded = az.from_netcdf(tmp_path / "chains.nc")
    for group, name in (("posterior", "net.0.weight"), ("sample_stats", "diverging")):
        np.testing.assert_array_equal(loaded[group][name], data[group][name])
        assert loaded[group][name].dtype == data[group][name].dtype


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
    tokens = ps.predict(model, draws, x).functions.log_softmax(-1)
    nats = tokens.gather(-1, y.clamp_min(0).expand(20, 6, 3).unsqueeze(-1)).squeeze(-1)
    nats = (nats * (y != -100)).sum(-1)
    found = data["log_likelihood"]["obs"].values.reshape(20, 6)
    np.testing.assert_allclose(found, nats.detach(), rtol=1e-10)
    with pytest.raises(ValueError, match="within the support"):  # no padding
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


COUNTS = [
    (ps.PoissonRegressor, torch.poisson(torch.full((12, 1), 3.0))),
    (ps.BinaryClassifier, torch.arange(12.0).unsqueeze(-1) % 2),
]


def test_counts_are_whole_numbers():
    for make, y in COUNTS:
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
