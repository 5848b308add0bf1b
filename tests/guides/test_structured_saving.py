"""Structured guides: predictions, saved states and copies."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Predictive
from torch import nn

import pyro_structvi as ps
from pyro_structvi.sites.autoguide import LocalLatentWarning
from pyro_structvi.weights.lazy import DelayDraws
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


def test_a_net_that_differentiates_itself_gets_drawn_weights():
    class Derivative(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                output = torch.tanh(self.layer(x))
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return torch.cat([output, slope], 1)

    model = ps.Regressor(ps.bayesianize(Derivative()), num_data=5, noise_scale=1.0)
    guide = ps.MeanFieldGuide(model)
    x = torch.randn(5, 3)
    guide.initialize(x, torch.zeros(5, 4))
    with DelayDraws():
        value = poutine.trace(guide).get_trace(x).nodes["net.layer.weight"]["value"]
    assert type(value) is torch.Tensor
