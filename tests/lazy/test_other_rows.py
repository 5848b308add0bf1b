"""Rows that are not examples, examples that meet, nets that are differentiated: one weight for all."""

import random

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from pyro.nn import PyroModule
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import InducingWeights, MeanField
from pyro_structvi.sites.finding import OtherRowsWarning
from tests.models import make_regressor, regression_data


class Applies(nn.Module):
    def __init__(self, layer, apply):
        super().__init__()
        self.layer, self.apply_layer = layer, apply
        self.adjacency = torch.rand(7, 7).softmax(-1)

    def forward(self, x):
        return self.apply_layer(self, x)


def in_a_row(net, x):
    """Send time steps or tokens through a layer as rows."""
    rows = x.flatten(0, 1) if x.is_floating_point() else x.flatten()
    return net.layer(rows).reshape(x.shape[:2]).sum(-1, keepdim=True)


def routed(net, x):
    """Show an expert a part of the examples."""
    return torch.cat([net.layer(x[:3]), x[3:, :1]])


LINEAR = lambda: nn.Linear(3, 1)  # noqa: E731
CASES = {
    "nodes of a graph that are all observed": (
        *(LINEAR, lambda net, x: net.adjacency @ net.layer(x)),
        *(torch.ones(7, 3), 7),
    ),
    "nodes of a graph": (
        *(LINEAR, lambda net, x: (net.adjacency @ net.layer(x))[:4]),
        *(torch.ones(7, 3), 4),
    ),
    "time steps": (LINEAR, in_a_row, torch.ones(4, 5, 3), 4),
    "tokens": (lambda: nn.Embedding(5, 1), in_a_row, torch.ones(4, 5, dtype=torch.long), 4),
    "routed": (LINEAR, routed, torch.ones(4, 3), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_not_examples_are_said_once_or_have_a_drawn_weight(case):
    make_layer, apply, x, size = CASES[case]

    def log_likelihood(local_reparam):
        torch.manual_seed(0)
        net = ps.bayesianize(Applies(make_layer(), apply), prior=1.0)
        model = ps.Regressor(net, size, 0.5)
        guide = ps.MeanFieldGuide(model, init_scale=0.3, local_reparam=local_reparam)
        data = x.double() if x.is_floating_point() else x, torch.zeros(size, 1)
        guide.initialize(*data)
        if local_reparam == "exact" and case == "time steps":
            (found,) = (p for p in guide.report(*data).parameters if p.name == "net.layer.weight")
            assert found.why == "rows that are not examples"
        torch.manual_seed(1)
        return ps.StructuredELBO().terms(model, guide, *data).log_likelihood["obs"]

    expected = log_likelihood(False)
    assert log_likelihood("exact") == expected
    if case == "time steps":
        assert log_likelihood("flipout") == expected
    if "all" in case:  # as many rows as examples, so the weights are drawn
        assert log_likelihood(True) == expected
        return
    with pytest.warns(OtherRowsWarning, match=r"weights at \['net.layer.weight'\].*\"exact\""):
        assert log_likelihood(True) != expected


def apart():
    """Return layers of many kinds that leave examples apart, batch normalization in evaluation."""
    norms = nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Dropout(0.5)
    net = nn.Sequential(nn.Linear(3, 4), *norms, nn.Tanh(), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, normalization=False), 12, 0.3)


def subsampled(x, y):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
    with pyro.plate("data", 12, subsample_size=6) as chosen:
        mean = nn.functional.linear(x[chosen], weight)
        pyro.sample("obs", dist.Normal(mean, 1.0).to_event(1), obs=y[chosen])


@pytest.mark.parametrize("make_model", [make_regressor, apart, lambda: subsampled])
@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_rows_that_are_examples_get_their_outputs_drawn(local_reparam, make_model):
    guide = ps.MeanFieldGuide(make_model(), local_reparam=local_reparam)
    guide.initialize(*regression_data())
    assert all(use.allows_outputs for use in guide.uses.values())


def test_a_net_differentiated_forwards_is_used_twice():
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            mean, slope = forward_ad.unpack_dual(nn.functional.linear(dual, weight))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean + slope, 1.0).to_event(1), obs=y)

    guide = ps.MeanFieldGuide(model)
    guide.initialize(torch.zeros(5, 3), torch.zeros(5, 1))
    assert guide.uses["weight"].count == 2


class Mapped(nn.Module):
    """A net that maps over its examples by itself, or not."""

    def __init__(self, is_mapped):
        super().__init__()
        self.first, self.last, self.is_mapped = nn.Linear(3, 4), nn.Linear(4, 1), is_mapped

    def net(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x):
        return torch.func.vmap(self.net)(x) if self.is_mapped else self.net(x)


@pytest.mark.parametrize(
    "family", [InducingWeights((2, 2)), MeanField()], ids=["inducing", "normal"]
)
def test_a_net_under_vmap_gets_weights_drawn_before_it_runs(family):
    found = []
    for is_mapped in (True, False):
        torch.manual_seed(0)
        model = ps.Regressor(ps.bayesianize(Mapped(is_mapped)), 12, 0.3)
        guide = ps.StructuredGuide(model, {"*": family}, local_reparam=is_mapped)
        guide.initialize(*regression_data())
        torch.manual_seed(1)
        found.append(ps.StructuredELBO().terms(model, guide, *regression_data()).elbo)
        reasons = {each.why for each in guide.report(*regression_data()).parameters}
        assert (reasons == {"a transform of torch.func"}) == is_mapped
    torch.testing.assert_close(*found)


class Contrastive(PyroModule):
    """Each image finds its text among those of the batch."""

    def __init__(self):
        super().__init__()
        self.image = ps.bayesianize(nn.Linear(3, 2), prior=1.0)
        self.text = ps.bayesianize(nn.Linear(4, 2), prior=1.0)

    def forward(self, image, text):
        logits = self.image(image) @ self.text(text).T
        with pyro.plate("data", len(image)):
            pyro.sample("obs", dist.Categorical(logits=logits), obs=torch.arange(len(image)))


def make(local_reparam, init_scale=0.7):
    torch.manual_seed(3)
    data = torch.randn(6, 3), torch.randn(6, 4)
    model = Contrastive()
    guide = ps.MeanFieldGuide(model, init_scale=init_scale, local_reparam=local_reparam)
    return model, guide, data


@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_the_weights_are_drawn_and_the_report_says_so(local_reparam):
    model, guide, data = make(local_reparam)
    found = {each.name: each for each in guide.report(*data).parameters}
    for name in ("image.weight", "text.weight"):
        assert (found[name].drawn, found[name].why) == ("weight", "examples that interact")
    torch.manual_seed(0)
    own = ps.StructuredELBO().terms(model, guide, *data).elbo
    model, guide, data = make(False)
    guide.initialize(*data)
    torch.manual_seed(0)
    assert own == ps.StructuredELBO().terms(model, guide, *data).elbo


def shared_noise(mean, y):
    covariance = 0.1 * torch.eye(len(y)) + 1.0
    pyro.sample("obs", dist.MultivariateNormal(mean, covariance), obs=y)


def centered(mean, y):
    pyro.sample("obs", dist.Normal(mean - mean.mean(), 0.3).to_event(1), obs=y)


def penalized(mean, y):
    pyro.factor("obs", -((mean - mean.mean() - y) ** 2).sum())


def kernel(mean, y):
    covariance = 0.1 * torch.eye(len(y)) + (-((mean - mean[:, None]) ** 2)).exp()
    pyro.sample("obs", dist.MultivariateNormal(torch.zeros_like(y), covariance), obs=y)


def following(mean, y):
    following = torch.cat([mean[1:], mean.new_zeros(1)])
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(mean - following, 0.3), obs=y)


def all_but_the_first(mean, y):
    others = mean[1:] - mean[1:].mean()
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(torch.cat([mean[:1], others]), 0.3), obs=y)


def reflected(mean, y):
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(mean + mean.flip(0), 0.3), obs=y)


def residuals(mean, y):
    own = y - mean + mean.mean()
    pyro.sample("obs", dist.Normal(torch.zeros_like(y), 0.3).to_event(1), obs=own)


def masked_by_all(mean, y):
    distance = (mean - y).abs().detach()
    with pyro.plate("data", len(y)), poutine.mask(mask=distance <= distance.mean()):
        pyro.sample("obs", dist.Normal(mean, 0.3), obs=y)


def scaled_by_all(mean, y):
    with pyro.plate("data", len(y)), poutine.scale(scale=mean.detach().softmax(0)):
        pyro.sample("obs", dist.Normal(mean, 0.3), obs=y)


def masked_by_itself(mean, y):
    with pyro.plate("data", len(y)), poutine.mask(mask=mean.detach() < 2):
        pyro.sample("obs", dist.Normal(mean, 0.3), obs=y)


def one_task(mean, y):
    with pyro.plate("tasks", 1, dim=-2), pyro.plate("data", len(y), dim=-1):
        pyro.sample("obs", dist.Normal(mean - mean.mean(), 0.3), obs=y)


def latent_field(mean, y):
    field = pyro.sample("field", dist.MultivariateNormal(mean, 0.1 * torch.eye(len(y)) + 1.0))
    pyro.sample("obs", dist.Normal(field, 0.3).to_event(1), obs=y)


def latent_sum(mean, y):
    total = pyro.sample("total", dist.Normal(mean.sum(), 0.3))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(total, 0.3), obs=y)


def latents_of_examples(mean, y):
    with pyro.plate("data", len(y)):
        own = pyro.sample("own", dist.Normal(mean, 0.3))
        pyro.sample("obs", dist.Normal(own, 0.3), obs=y)


def summed(mean, y):
    pyro.factor("obs", -((mean - y) ** 2).sum())


def layer_under(likelihood, num_data=4):
    """Return a model with one layer and a likelihood, and data for it."""

    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        likelihood(nn.functional.linear(x, weight).squeeze(-1), y)

    torch.manual_seed(0)
    return model, 2 + 0.3 * torch.randn(num_data, 3), torch.randn(num_data)


def observe(likelihood, local_reparam):
    """Return the mean bound over particles, and whether outputs may be sampled."""
    model, x, y = layer_under(likelihood)
    guide = ps.MeanFieldGuide(model, init_scale=0.5, local_reparam=local_reparam)
    guide.initialize(x, y)
    torch.manual_seed(1)
    terms = ps.StructuredELBO(num_particles=4).terms(model, guide, x, y)
    return terms.elbo, guide.uses["weight"].allows_outputs


TOGETHER = [shared_noise, centered, penalized, kernel, following, all_but_the_first, one_task]
TOGETHER += [latent_field, latent_sum, reflected, residuals, masked_by_all, scaled_by_all]


@pytest.mark.parametrize("likelihood", TOGETHER)
@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_a_likelihood_of_several_examples_together_has_a_drawn_weight(likelihood, local_reparam):
    assert observe(likelihood, local_reparam)[0] == observe(likelihood, False)[0]


@pytest.mark.parametrize("likelihood", [summed, latents_of_examples, masked_by_itself])
def test_a_sum_over_examples_has_drawn_outputs(likelihood):
    assert observe(likelihood, "exact")[1]


@pytest.mark.parametrize("likelihood", [following, one_task, reflected, latents_of_examples])
def test_interacting_examples_of_a_net_in_half_precision_are_seen(likelihood):
    """A bound of rounding that fits bfloat16 would hide everything."""

    def model(x, y):
        zeros = torch.zeros(1, 3, dtype=torch.bfloat16)
        weight = pyro.sample("weight", dist.Normal(zeros, 1.0).to_event(2))
        likelihood(nn.functional.linear(x, weight).squeeze(-1), y)

    torch.manual_seed(0)
    x, y = 2 + 0.3 * torch.randn(20, 3, dtype=torch.bfloat16), torch.randn(20, dtype=torch.bfloat16)
    guide = ps.MeanFieldGuide(model)
    guide.initialize(x, y)
    assert guide.uses["weight"].examples_interact == (likelihood is not latents_of_examples)


@pytest.mark.parametrize("likelihood", [*TOGETHER, summed, latents_of_examples])
@pytest.mark.parametrize("hidden", [{"expose": ["weight"]}, {"hide": ["field", "total", "own"]}])
def test_what_is_hidden_from_the_guide_is_seen(likelihood, hidden):
    """As of a part of an AutoGuideList, or beside a handwritten guide of latents."""
    model, *data = layer_under(likelihood)
    guide = ps.MeanFieldGuide(poutine.block(model, **hidden), local_reparam="exact")
    guide.initialize(*data)
    assert guide.site_names == ["weight"]
    assert guide.uses["weight"].allows_outputs == (likelihood not in TOGETHER)


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.KTiedGuide])
def test_several_examples_after_one_have_a_drawn_weight(make_guide):
    """A single example shows no likelihood of several together, and neither does a run without one."""

    def if_given(mean, y):
        if y is not None:
            centered(mean, y)

    for size, likelihood in ((1, centered), (4, if_given)):
        bounds = []
        for local_reparam in (True, False):
            model, x, y = layer_under(likelihood)
            guide = make_guide(model, init_scale=0.5, local_reparam=local_reparam)
            guide.initialize(x[:size], y[:1] if size == 1 else None)
            torch.manual_seed(1)
            bounds.append(ps.StructuredELBO(num_particles=4).terms(model, guide, x, y).elbo)
        assert bounds[0] == bounds[1]
    model, x, y = layer_under(summed)
    guide = make_guide(model)
    uses = []
    for examples in (1, 4, 1):
        guide.initialize(x[:examples], y[:examples])
        is_named = "initialized without several observed examples" in str(guide.report(x, y))
        uses.append((guide.uses["weight"].is_uncompared, is_named))
    assert uses == [(True, True), (False, False), (False, False)]


@pytest.mark.parametrize("mixes", [False, True])
def test_a_fit_of_several_examples_after_single_ones_draws_outputs(mixes):
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), noise=0.1)
    guide = ps.MixtureGuide(model, ps.MeanFieldGuide, 2) if mixes else ps.MeanFieldGuide(model)
    x, y, uses = torch.randn(4, 3), torch.randn(4, 1), []
    for size in (1, None):
        ps.fit(model, guide, (x, y), num_steps=2, batch_size=size, progress=False)
        parts = guide.members if mixes else [guide]
        uses.append([part.uses["net.weight"].is_uncompared for part in parts])
    assert uses[0] == [True for _ in parts]
    assert uses[1] == [False for _ in parts]


def test_runs_that_are_compared_have_the_same_random_numbers_of_python():
    class Dropping(nn.Linear):
        def forward(self, x):
            return super().forward(x if random.random() < 0.5 else -x)

    model = ps.Regressor(ps.bayesianize(Dropping(3, 1), prior=1.0), 12, 0.3)
    for seed in range(8):
        random.seed(seed)
        guide = ps.MeanFieldGuide(model)
        guide.initialize(torch.randn(12, 3), torch.randn(12, 1))
        assert guide.uses["net.weight"].allows_outputs
    assert random.random() == random.Random(7).random()
