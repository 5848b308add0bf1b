"""Weights that a pass skips are a part of the model all the same."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_structvi as ps
from pyro_structvi.sites.autoguide import NewParametersWarning
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


class Groups(PyroModule):
    """Effects of groups, which the module reads in their plate, and a slope under a scale."""

    def __init__(self):
        super().__init__()
        self.mean = PyroSample(dist.Normal(0.0, 1.0))
        self.effect = PyroSample(lambda self: dist.Normal(self.mean, 0.5))
        self.slope = PyroSample(dist.Normal(torch.zeros(5, 3), 1.0).to_event(1))
        self.unread = PyroSample(dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def forward(self, x, y=None):
        mean, data = self.mean, pyro.plate("data", 5, dim=-1)
        with data, poutine.scale(scale=0.1):
            slope = self.slope
        with pyro.plate("groups", 4, subsample_size=2, dim=-2) as index:
            effect, other = self.effect, pyro.sample("other", dist.Normal(mean, 0.5))
            with data:
                loc = effect + other + (slope * x[index]).sum(-1)
                pyro.sample("obs", dist.Normal(loc, 0.3), obs=None if y is None else y[index])


def sites_of(model, *data):
    trace = poutine.trace(model).get_trace(*data)
    return {
        name: (site["value"].shape, site["scale"], [f.name for f in site["cond_indep_stack"]])
        for name, site in trace.iter_stochastic_nodes()
    }


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.MatrixNormalGuide])
def test_a_module_reads_its_sites_in_plates_and_under_handlers(make_guide):
    model, data = Groups(), (torch.randn(4, 5, 3), torch.randn(4, 5))
    before = sites_of(model, *data)
    guide = make_guide(model, init_scale=0.2)
    after = sites_of(model, *data)
    unread = after.pop("unread")
    assert (before, unread) == (after, (torch.Size([2]), 1.0, []))
    with pytest.warns(UnusedSiteWarning, match=r"\['unread'\]"):
        guide.initialize(*data)
    shapes = {name: tuple(value.shape) for name, value in guide.draw(local=True).items()}
    effects = {"mean": (), "slope": (5, 3), "effect": (4, 1), "other": (4, 1), "unread": (2,)}
    assert shapes == effects
    q = dist.Normal(guide["slope"]().mean, 0.2)
    expected = 0.1 * torch.distributions.kl_divergence(q, dist.Normal(0.0, 1.0)).sum()
    nats = ps.StructuredELBO().terms(model, guide, *data).kl["slope"]
    torch.testing.assert_close(nats, expected, rtol=1e-10, atol=0)


def test_parameters_of_before_the_run_are_told_where_it_finds_a_plate():
    model = Groups()
    guide = ps.MeanFieldGuide(model)
    before = {*guide.parameters()}
    new = pytest.warns(NewParametersWarning, match="posteriors.effect.loc")
    with new, pytest.warns(UnusedSiteWarning):
        guide.initialize(torch.randn(4, 5, 3), torch.randn(4, 5))
    assert before.isdisjoint(guide.parameters())


def test_a_run_has_the_last_word_on_the_shape_of_a_declared_site():
    class Errors(PyroModule):
        def __init__(self):
            super().__init__()
            self.size = 1
            self.errors = PyroSample(
                lambda self: dist.Normal(torch.zeros(self.size), 1.0).to_event(1)
            )

        def forward(self, y):
            self.size = len(y)
            pyro.sample("obs", dist.Normal(self.errors.cumsum(0), 0.1).to_event(1), obs=y)

    guide = ps.MeanFieldGuide(Errors())
    assert guide.draw()["errors"].shape == (1,)
    guide.initialize(torch.zeros(4))
    assert guide.draw()["errors"].shape == (4,)
