"""Draws of a weight that are applied without the weight being formed."""

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.structures.inducing.outputs import MatheronDraw
from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_role import SiteUse
from tests.distributions.cases import make_mean_field
from tests.distributions.inducing.inducing_laws import make


def law():
    return make(make_mean_field, (30, 24))


def test_every_use_of_a_weight_is_of_one_draw():
    weight = LazyWeight(law(), SiteUse("weight", count=2))
    x, y = torch.randn(5, 24), torch.randn(3, 24)
    first, second = F.linear(x, weight), F.linear(y, weight)
    assert weight.sampled == "factors"
    formed = weight.draw()
    torch.testing.assert_close(first, F.linear(x, formed))
    torch.testing.assert_close(second, F.linear(y, formed))
    torch.testing.assert_close(F.linear(x, weight), first, rtol=0, atol=0)
    assert torch.equal(weight + 0, formed)


def test_a_weight_that_was_formed_first_stays_that_weight():
    weight, x = LazyWeight(law(), SiteUse("weight", count=2)), torch.randn(5, 24)
    formed = weight + 0
    assert torch.equal(F.linear(x, weight), F.linear(x, formed))
    assert weight.sampled == "weight"


def test_drawn_weights_are_not_formed_in_a_training_step(monkeypatch):
    """With ``local_reparam=False`` every example still meets one weight."""
    net = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 40, bias=False))
    model = ps.Regressor(ps.bayesianize(net, prior=ps.FanIn()), num_data=6, noise_scale=0.1)
    guide = ps.InducingWeightGuide(model, (4, 4), local_reparam=False)
    x, y = torch.randn(6, 60), torch.randn(6, 40)
    guide.initialize(x, y)
    with monkeypatch.context() as patch:
        patch.setattr(MatheronDraw, "weight", lambda draw: pytest.fail("A weight was formed."))
        ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
    for parameter in guide.parameters():
        assert torch.isfinite(parameter.grad).all()
    with DelayDraws():
        trace = pyro.poutine.trace(guide).get_trace(x, y)
    weights = {name: trace.nodes[name]["value"] for name in guide.site_names}
    replayed = pyro.poutine.replay(model, trace=trace)
    mean = pyro.poutine.trace(replayed).get_trace(x).nodes["obs"]["fn"].mean
    formed = {name: value.draw() for name, value in weights.items()}
    hidden = torch.tanh(F.linear(x, formed["net.0.weight"], formed["net.0.bias"]))
    torch.testing.assert_close(mean, F.linear(hidden, formed["net.2.weight"]))
