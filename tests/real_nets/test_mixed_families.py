"""One guide with a family for each kind of weight, as in the papers."""

import torch

import pyro_structvi as ps
from pyro_structvi.families import KTied, PointEstimate
from tests.real_nets.test_nets import assert_draws_are_functions, case_of


def families_of(guide):
    return {name: guide[name].family for name in guide.site_names}


def test_an_lstm_with_points_for_its_biases():
    model, data = case_of("LSTM").make()
    guide = ps.StructuredGuide(model, {"*bias*": PointEstimate(), "*weight*": KTied(2)})
    assert all(
        family == (PointEstimate() if "bias" in name else KTied(2))
        for name, family in families_of(guide).items()
    )
    guide.initialize(*data)
    assert_draws_are_functions(model, guide, data[:-1])
    first, second = guide.draw(), guide.draw()
    for name in guide.site_names:
        assert torch.equal(first[name], second[name]) == ("bias" in name)
    kl = ps.StructuredELBO().terms(model, guide, *data).kl["net.layer.bias_hh_l1"]
    bias = guide.draw()["net.layer.bias_hh_l1"]
    prior = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(kl, -prior.log_prob(bias).sum())
