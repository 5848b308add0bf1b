"""to_inference_data: groups, dims and values, and what ArviZ makes of them."""

import warnings

import arviz as az
import numpy as np
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.models import make_classifier, make_regressor, regression_data


class Chains(dict):
    """Draws of two chains, as NUTS returns them."""

    num_chains = 2


def test_groups_dims_and_values():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.KTiedGuide(model, init_scale=0.3)
    each = [guide.draw() for _ in range(6)]
    draws = Chains({name: torch.stack([d[name] for d in each]) for name in guide.site_names})
    data = ps.to_inference_data(model, draws, x, y)
    assert set(data.groups()) == {
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "observed_data",
    }
    weight = data.posterior["net.0.weight"]
    assert weight.dims[:2] == ("chain", "draw")
    assert weight.shape == (2, 3, 5, 3)
    np.testing.assert_array_equal(weight.values[1, 0], each[3]["net.0.weight"].detach().numpy())
    functions = ps.predict(model, draws, x).functions
    expected = torch.distributions.Normal(functions, 0.3).log_prob(y).sum(-1).reshape(2, 3, 12)
    np.testing.assert_allclose(data.log_likelihood["obs"].values, expected.numpy())
    assert data.posterior_predictive["obs"].shape == (2, 3, 12, 1)
    np.testing.assert_array_equal(data.observed_data["obs"].values, y.numpy())


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
            value[0, 0].size for value in mean_field.posterior.values()
        )
        table = az.compare({"mean field": mean_field, "k-tied": k_tied})
    assert set(table.index) == {"mean field", "k-tied"}
    assert np.isfinite(table["elpd_loo"]).all()


def test_loo_is_the_log_density_for_a_posterior_without_spread():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=1e-9)
    data = ps.to_inference_data(model, guide, x, y, num_samples=100)
    exact = ps.predict(model, guide, x, 2, y=y).log_density.sum().item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert az.loo(data).elpd_loo == pytest.approx(exact, rel=1e-5)


def test_values_are_float64_for_a_float32_model():
    net = nn.Linear(3, 1).float()
    model = ps.Regressor(ps.bayesianize(net), num_data=12, noise_scale=0.3)
    x, y = (value.float() for value in regression_data())
    data = ps.to_inference_data(model, ps.MeanFieldGuide(model), x, y, num_samples=4)
    assert data.posterior["net.weight"].dtype == np.float64


def test_it_survives_a_file(tmp_path):
    model, (x, y) = make_regressor(), regression_data()
    data = ps.to_inference_data(model, ps.KTiedGuide(model), x, y, num_samples=4)
    data.to_netcdf(tmp_path / "k_tied.nc")
    loaded = az.from_netcdf(tmp_path / "k_tied.nc")
    np.testing.assert_array_equal(loaded.posterior["net.0.weight"], data.posterior["net.0.weight"])


def test_lengths_must_agree():
    model, (x, y) = make_regressor(), regression_data()
    with pytest.raises(ValueError, match=r"same length, but got \[12\] and 11"):
        ps.to_inference_data(model, ps.MeanFieldGuide(model), x, y[:-1])


def test_chains_must_stay_whole():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    draws = Chains({name: torch.stack([guide.draw()[name]] * 6) for name in guide.site_names})
    with pytest.raises(ValueError, match="multiple of the 2 chains, but got 3"):
        ps.to_inference_data(model, draws, x, y, num_samples=3)
