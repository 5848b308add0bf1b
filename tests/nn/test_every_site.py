"""Weights that a pass skips are a part of the model all the same."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.sites.finding import UnusedSiteWarning
from tests.models import regression_data


class Experts(nn.Module):
    """Layers with a selection that runs in a pass."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))
        self.taken = (0,)

    def forward(self, x):
        return sum(self.experts[number](x) for number in self.taken)


def bayesian_experts():
    net = ps.bayesianize(Experts(), prior=2.0)
    return net, ps.Regressor(net, 12, 0.3)


def closure_over_experts():
    net = ps.bayesianize(Experts(), prior=2.0)

    def model(x, y=None):
        mean = net(x)
        with pyro.plate("data", len(x)):
            infer = {"is_observation": True}
            pyro.sample("obs", dist.Normal(mean, 0.3).to_event(1), obs=y, infer=infer)
        return mean

    return net, model


def make_guide(model, guide=ps.KTiedGuide, **options):
    guide = guide(model, init_scale=0.1, **options)
    with pytest.warns(UnusedSiteWarning, match=r"\['.*experts.1.weight', .*'.*experts.2.bias'\]"):
        guide.initialize(*regression_data())
    return guide


@pytest.mark.parametrize("make", [bayesian_experts, closure_over_experts])
def test_every_pass_counts_the_kl_of_every_site(make):
    net, model = make()
    guide, (x, y) = make_guide(model, join_bias=False), regression_data()
    names = [*guide.site_names]
    assert len(names) == 6
    expected = None
    for taken in [(0,), (1,), (2, 0), ()]:
        net.taken = taken or (0,)
        kl = ps.StructuredELBO().terms(model, guide, x, y).kl
        assert [*kl] == names
        expected = kl if expected is None else expected
        for name in names:
            torch.testing.assert_close(kl[name], expected[name], rtol=1e-12, atol=0)


def test_a_layer_found_unused_may_be_used_any_number_of_times():
    net, model = bayesian_experts()
    guide = make_guide(model)
    net.taken = (1, 1, 2, 2)
    x, y = regression_data()
    torch.manual_seed(0)
    likelihoods = [
        ps.StructuredELBO().terms(model, guide, x, y).log_likelihood["obs"] for _ in range(2)
    ]
    assert likelihoods[0] != likelihoods[1]
    for taken in [net.taken, (0,)]:
        net.taken = taken
        guide.initialize(x, y)  # the most uses of all passes count
    net.taken = (1, 1, 0, 2)
    assert torch.isfinite(ps.StructuredELBO().terms(model, guide, x, y).elbo)


def test_predictions_take_the_posterior_of_layers_that_training_skipped():
    net, model = closure_over_experts()
    guide, (x, _) = make_guide(model, ps.MeanFieldGuide), regression_data()
    for posterior in guide.all_posteriors():
        torch.nn.init.constant_(posterior.loc, 5.0)
        torch.nn.init.constant_(posterior.log_scale, -20.0)
    net.taken = (1, 2)
    functions = ps.predict(model, guide, x, num_samples=3).functions
    expected = 2 * (5 * x.sum(-1, keepdim=True) + 5)
    torch.testing.assert_close(functions, expected.expand(3, 12, 1), atol=1e-6, rtol=0)


def test_a_function_must_sample_its_sites_in_each_pass():
    def model(both):
        for name in ("first", "second") if both else ("first",):
            pyro.sample(name, dist.Normal(torch.zeros(2), 1.0).to_event(1))

    guide = ps.MeanFieldGuide(model)
    guide.initialize(True)
    pyro.enable_validation(False)  # it would warn before
    with pytest.raises(ValueError, match=r"site 'second' is missing in the model.*each pass"):
        ps.StructuredELBO().terms(model, guide, False)


def test_a_net_that_reaches_its_layer_past_the_module_tree_is_named():
    class Closure(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            layer = self.layer
            self.apply_layer = lambda x: layer(x)  # a copy of the net still calls this very layer

        def forward(self, x):
            return self.apply_layer(x)

    model = ps.Regressor(ps.bayesianize(Closure()), 12, 0.3)
    with pytest.warns(
        UnusedSiteWarning, match=r"\['net.layer.weight', 'net.layer.bias'\].*closure"
    ):
        ps.MeanFieldGuide(model).initialize(*regression_data())
