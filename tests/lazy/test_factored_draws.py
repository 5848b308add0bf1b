"""Draws of a weight that are applied without the weight being formed."""

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import AugmentedMatrixNormal, InducingNormal, MatrixNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from pyro_structvi.structures.inducing.outputs import MatheronDraw
from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_role import SiteUse

OUT, IN = 30, 24


def make_law(event_shape=(OUT, IN), bias_scale=None):
    """Return a law of thin factors, whose arguments are leaves."""
    size = torch.Size(event_shape[1:]).numel()
    shapes = ((2, event_shape[0]), (3, size), (2,), (3,), (2, 3), (2, 3), ())
    row, column, row_diagonal, column_diagonal, loc, scale, conditional = (
        (0.3 * torch.randn(shape)).exp().requires_grad_() for shape in shapes
    )
    joint = AugmentedMatrixNormal(
        row, column, row_diagonal, column_diagonal, 0.7, bias_scale, event_shape=event_shape
    )
    leaves = [row, column, row_diagonal, column_diagonal, loc, scale, conditional]
    return InducingNormal(joint, loc, scale, conditional), leaves


CONVOLUTION = ConvolutionMap(F.conv2d, (6, 2, 2), stride=2, padding=1, dilation=2)

MAPS = {
    "dense": (DenseMap(), (OUT, IN), (5, IN)),
    "sequence": (DenseMap(), (OUT, IN), (5, 4, IN)),
    "one input": (DenseMap(), (OUT, IN), (IN,)),
    "convolution": (CONVOLUTION, (OUT, 6, 2, 2), (5, 6, 7, 6)),
    "dense, bias column": (BiasColumnMap(DenseMap()), (OUT, IN + 1), (5, IN)),
    "convolution, bias column": (BiasColumnMap(CONVOLUTION), (OUT, IN + 1), (5, 6, 7, 6)),
}


@pytest.mark.parametrize(("linear_map", "event_shape", "shape"), MAPS.values(), ids=MAPS)
def test_applying_a_draw_is_applying_its_weight(linear_map, event_shape, shape):
    q, leaves = make_law(event_shape, 1.3 if linear_map.has_bias_column else None)
    draw, x, bias = q.draw_factored(), torch.randn(shape, requires_grad=True), torch.randn(OUT)
    outputs = draw.apply(linear_map, x, bias)
    expected = linear_map(x, draw.weight().reshape(OUT, -1), bias)
    torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(outputs)
    actual = torch.autograd.grad(outputs, [*leaves, x], direction, retain_graph=True)
    oracle = torch.autograd.grad(expected, [*leaves, x], direction)
    for ours, dense in zip(actual, oracle, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-9)


def test_every_use_of_a_weight_is_of_one_draw():
    q, _ = make_law()
    weight = LazyWeight(q, SiteUse("weight", count=2))
    x, y = torch.randn(5, IN), torch.randn(3, IN)
    first, second = F.linear(x, weight), F.linear(y, weight)
    assert weight.sampled == "factors"
    formed = weight.draw()
    torch.testing.assert_close(first, F.linear(x, formed))
    torch.testing.assert_close(second, F.linear(y, formed))
    torch.testing.assert_close(F.linear(x, weight), first, rtol=0, atol=0)
    assert torch.equal(weight + 0, formed)


def test_a_weight_that_was_formed_first_stays_that_weight():
    q, _ = make_law()
    weight, x = LazyWeight(q, SiteUse("weight", count=2)), torch.randn(5, IN)
    formed = weight + 0
    assert torch.equal(F.linear(x, weight), F.linear(x, formed))
    assert weight.sampled == "weight"


def test_an_inducing_law_without_factors_of_its_own_has_factored_draws_too():
    q, _ = make_law()
    tril = torch.eye(2), torch.eye(3)
    law = InducingNormal.from_inducing(q.joint, MatrixNormal(torch.zeros(2, 3), *tril), 0.5)
    draw, x = law.draw_factored(), torch.randn(5, IN)
    torch.testing.assert_close(draw.apply(DenseMap(), x), x @ draw.weight().mT)


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
