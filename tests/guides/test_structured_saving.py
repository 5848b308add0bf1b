"""Structured guides: predictions, saved states and copies."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Predictive

import pyro_structvi as ps
from pyro_structvi.sites.autoguide import LocalLatentWarning
from tests.guides.test_structured import make_svi
from tests.models import linear_function, local_latent_function, make_regressor, regression_data


def test_predictive_draws_consistent_functions():
    model = make_regressor()
    x, y = regression_data()
    guide = ps.KTiedGuide(model, init_scale=0.5)
    make_svi(model, guide).step(x, y)
    sites = [*guide.site_names, "_RETURN"]
    draws = Predictive(model, guide=guide, num_samples=4, return_sites=sites)(x)
    for index in range(4):
        w0, b0, w2, b2 = (draws[name][index].squeeze(0) for name in guide.site_names)
        expected = F.linear(torch.tanh(F.linear(x, w0, b0)), w2, b2)
        torch.testing.assert_close(draws["_RETURN"][index], expected)


def test_predictive_on_another_number_of_examples():
    guide = ps.MeanFieldGuide(local_latent_function)
    make_svi(local_latent_function, guide).step(torch.randn(6, 3), torch.randn(6))
    with pytest.warns(LocalLatentWarning, match="drawn from the model"):
        draws = Predictive(local_latent_function, guide=guide, num_samples=3)(torch.randn(11, 3))
    assert draws["shift"].shape == draws["obs"].shape == (3, 11)


def test_predicting_from_a_guide_that_knows_no_site_is_an_error():
    guide, x = ps.MeanFieldGuide(linear_function), torch.zeros(2, 3)
    message = r"knows no latent site yet.*call `guide.initialize\(...\)`"
    for attempt in (
        lambda: Predictive(linear_function, guide=guide, num_samples=2)(x),
        lambda: ps.predict(linear_function, guide, x),
        guide.draw,
    ):
        with pytest.raises(RuntimeError, match=message):
            attempt()


def test_a_pickle_carries_no_data_and_no_model():
    model, data = make_regressor(size=10_000), regression_data(size=10_000)
    guide = ps.KTiedGuide(model, init_loc_fn=lambda site: torch.zeros(site["fn"].shape()))
    make_svi(model, guide).step(*data)
    payload = pickle.dumps(guide)
    assert len(payload) < 20_000
    loaded = pickle.loads(payload)
    assert (loaded.model, loaded.init_loc_fn) == (None, None)
    assert copy.deepcopy(guide).init_loc_fn is guide.init_loc_fn
    assert guide.model is model
    assert loaded.draw().keys() == guide.draw().keys()
    with pytest.raises(RuntimeError, match="unpickled without its model"):
        pickle.loads(payload).initialize(*data)
    make_svi(model, loaded).step(*data)


def test_sites_of_functions_come_in_the_order_of_execution_whatever_their_names():
    names = ["last", "first", "a.b", "a/b", "values", "training"]

    def model():
        for name in names:
            pyro.sample(name, dist.Normal(0.0, 1.0))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    assert guide.site_names == [*guide.draw()] == names
    assert len(list(guide.parameters())) == 2 * len(names)
    with pytest.raises(KeyError, match=r"'net.9.weight' is none of the sites"):
        guide["net.9.weight"]
