"""Rows that are not examples, and nets differentiated inside a model: the weight must be one weight."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import pyro_structvi as ps
from pyro_structvi.sites.finding import OtherRowsWarning
from tests.models import make_regressor, regression_data


class Nodes(nn.Module):
    """A graph convolution, of whose nodes some are observed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.adjacency = torch.rand(7, 7).softmax(-1)

    def forward(self, x):
        return (self.adjacency @ self.layer(x))[:4]


class Steps(nn.Module):
    """Time steps in a row, as a text's tokens are sent through a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).reshape(x.shape[:2]).sum(-1, keepdim=True)


class Tokens(nn.Module):
    """The same after an embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 1)

    def forward(self, x):
        return self.table(x.flatten()).reshape(x.shape).sum(-1, keepdim=True)


class Routed(nn.Module):
    """An expert that sees a part of the examples."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(3, 1)

    def forward(self, x):
        return torch.cat([self.expert(x[:3]), x[3:, :1]])


class AllNodes(Nodes):
    """A graph whose nodes are all observed: as many rows as examples, and yet mixed."""

    def forward(self, x):
        return self.adjacency @ self.layer(x)


CASES = {
    "nodes that are all observed": (AllNodes, torch.ones(7, 3), 7),
    "nodes of a graph": (Nodes, torch.ones(7, 3), 4),
    "time steps": (Steps, torch.ones(4, 5, 3), 4),
    "tokens": (Tokens, torch.ones(4, 5, dtype=torch.long), 4),
    "routed": (Routed, torch.ones(4, 3), 4),
}
EVERY_CASE = pytest.mark.parametrize(("net", "x", "size"), CASES.values(), ids=CASES)


def terms(net, x, size, local_reparam):
    torch.manual_seed(0)
    x = x.double() if x.is_floating_point() else x
    model = ps.Regressor(ps.bayesianize(net(), prior=1.0), size, 0.5)
    guide = ps.MeanFieldGuide(model, init_scale=0.3, local_reparam=local_reparam)
    data = x, torch.zeros(size, 1)
    guide.initialize(*data)
    torch.manual_seed(1)
    return ps.StructuredELBO().terms(model, guide, *data).log_likelihood["obs"]


@EVERY_CASE
def test_the_weight_is_drawn_where_the_joint_distribution_is_promised(net, x, size):
    assert terms(net, x, size, "exact") == terms(net, x, size, False)
    if net is Steps:
        assert terms(net, x, size, "flipout") == terms(net, x, size, False)


@EVERY_CASE
def test_by_default_it_is_said_once(net, x, size):
    if net is AllNodes:  # as many rows as examples, so the weights are drawn
        assert terms(net, x, size, True) == terms(net, x, size, False)
        return
    layer = "table" if net is Tokens else "expert" if net is Routed else "layer"
    with pytest.warns(OtherRowsWarning, match=rf"weights at \['net.{layer}.weight'\].*\"exact\""):
        assert terms(net, x, size, True) != terms(net, x, size, False)


class Apart(nn.Module):
    """Layers of many kinds that leave examples apart; the batch normalization only in evaluation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.norms = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Dropout(0.5))

    def forward(self, x):
        return self.last(torch.tanh(self.norms(self.first(x))))


def apart():
    return ps.Regressor(ps.bayesianize(Apart(), normalization=False), 12, 0.3)


@pytest.mark.parametrize("make_model", [make_regressor, apart])
@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_rows_that_are_examples_get_their_outputs_drawn(local_reparam, make_model):
    model = make_model()
    guide = ps.MeanFieldGuide(model, local_reparam=local_reparam)
    guide.initialize(*regression_data())
    assert all(use.allows_outputs for use in guide.uses.values())


def test_the_number_of_examples_is_that_of_the_pass():
    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        with pyro.plate("data", 10, subsample_size=6) as chosen:
            mean = nn.functional.linear(x[chosen], weight).squeeze(-1)
            pyro.sample("obs", dist.Normal(mean, 1.0), obs=y[chosen])

    guide = ps.MeanFieldGuide(model, local_reparam="exact")
    guide.initialize(torch.zeros(10, 3), torch.zeros(10))
    assert guide.uses["weight"].allows_outputs


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
