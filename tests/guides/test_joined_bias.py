"""Biases joined to their weights: one joint posterior, two sites of the model."""

from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import KTied, MeanField
from pyro_structvi.sites.finding import UnusedSiteWarning
from pyro_structvi.testing import check_family
from pyro_structvi.weights.lazy import DelayDraws
from pyro_structvi.weights.placeholders import LazySlice
from tests.guides.joined_guides import JOINED, layer_function, linear_model, make_guide
from tests.models import regression_data


def test_a_weight_takes_its_bias_along():
    guide = make_guide()
    assert guide.site_names == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert guide["net.0.weight"] is guide["net.0.bias"]
    assert guide["net.0.weight"]().event_shape == (5, 4)
    assert sum(parameter.numel() for parameter in guide.parameters()) == 4 * (5 * 4 + 1 * 6)
    assert "net.0.weight and net.0.bias: LowRank" in repr(guide)


def test_both_start_at_the_nets_values_and_are_drawn_apart():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    guide = make_guide(ps.Classifier(ps.bayesianize(net), num_data=5))
    median, draw = guide.median(), guide.draw()
    for name, parameter in net.named_parameters():
        assert torch.equal(median[f"net.{name}"], parameter)
        assert draw[f"net.{name}"].shape == parameter.shape


def test_names_with_affixes_are_joined():
    guide = make_guide(ps.Classifier(ps.bayesianize(nn.LSTM(3, 4)), num_data=5))
    assert guide["net.weight_ih_l0"] is guide["net.bias_ih_l0"]
    assert guide["net.weight_hh_l0"] is guide["net.bias_hh_l0"]


def test_sites_of_a_function_are_joined_by_their_names():
    guide = make_guide(layer_function("layer."))
    guide.initialize(*regression_data())
    assert guide["layer.weight"]().event_shape == (1, 4)


@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 2, bias=False), nn.ConvTranspose1d(3, 2, 2), nn.Embedding(3, 2)]
)
def test_a_weight_without_a_fitting_bias_stays_by_itself(layer):
    guide = make_guide(ps.Classifier(ps.bayesianize(layer), num_data=5))
    assert guide["net.weight"]().event_shape == layer.weight.shape


def test_the_weights_family_decides():
    model, _ = linear_model()
    separate = KTied(1, join_bias=False)
    guide = ps.StructuredGuide(model, {"*.weight": separate, "*.bias": JOINED})
    assert guide["net.bias"] is not guide["net.weight"]
    for families in ({"*.weight": JOINED, "*": MeanField()}, {"*.weight": JOINED}):
        guide = ps.StructuredGuide(model, families)
        assert guide["net.bias"] is guide["net.weight"]


def test_a_pattern_of_biases_keeps_them_apart():
    model, _ = linear_model()
    guide = ps.StructuredGuide(model, {"*.weight": JOINED, "*.bias": MeanField()})
    assert guide["net.bias"] is not guide["net.weight"]
    assert isinstance(guide["net.bias"].family, MeanField)


@dataclass(frozen=True)
class Narrow(KTied):
    """k-tied weights of at most four columns."""

    def fits(self, site):
        return super().fits(site) and site.shape[1] <= 4


@pytest.mark.parametrize(("size", "is_joined"), [(3, True), (4, False)])
def test_a_family_that_does_not_fit_both_leaves_the_bias_apart(size, is_joined):
    model = ps.Classifier(ps.bayesianize(nn.Linear(size, 2)), num_data=5)
    guide = ps.StructuredGuide(model, {"*": Narrow(1)})
    assert (guide["net.bias"] is guide["net.weight"]) is is_joined
    check_family(Narrow(1), (2, size))


def test_a_bias_named_outright_has_its_own_family():
    model, _ = linear_model()
    guide = ps.StructuredGuide(model, {"net.bias": MeanField(), "*": JOINED})
    assert guide["net.bias"].family == MeanField()
    assert guide["net.weight"]().event_shape == (2, 3)


def test_a_model_that_samples_only_one_of_both_is_an_error():
    guide = make_guide(layer_function())
    guide.initialize(*regression_data())
    message = r"'weight' is joined with its bias 'bias'.*samples only one.*`join_bias=False`"
    with pytest.raises(ValueError, match=message):
        guide.initialize(*regression_data(), with_bias=False)


def test_a_bias_that_no_pass_uses_is_joined_all_the_same():
    class WeightOnly(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight)

    model = ps.Regressor(ps.bayesianize(WeightOnly(3, 1)), num_data=12, noise_scale=0.3)
    guide = make_guide(model)
    with pytest.warns(UnusedSiteWarning, match=r"\['net.bias'\]"):
        guide.initialize(*regression_data())
    terms = ps.StructuredELBO().terms(model, guide, *regression_data())
    terms.elbo.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in guide.parameters())


def run_layer(guide, args, layer):
    """Return a layer's outputs where the guide's values are handed to it, undrawn."""
    with DelayDraws():
        values = poutine.trace(guide).get_trace(*args).nodes
    return layer(values["net.weight"]["value"], values["net.bias"]["value"])


USES = {
    "without the bias": lambda x, w, b: F.linear(x, w) + b,
    "with another bias": lambda x, w, b: F.linear(x, w, b + 0),
    "by hand": lambda x, w, b: x @ w.T + b,
    "one after the other": lambda x, w, b: b + x @ w.T,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_other_use_sees_one_draw_of_both(use):
    model, args = linear_model()
    guide = make_guide(model)
    guide.initialize(*args)
    x, parts = torch.randn(5, 3), {}

    def layer(weight, bias):
        parts.update(weight=weight, bias=bias)
        return use(x, weight, bias)

    outputs = run_layer(guide, args, layer)
    assert isinstance(parts["weight"], LazySlice)
    assert parts["weight"].whole.is_drawn
    torch.testing.assert_close(outputs, F.linear(x, parts["weight"].draw(), parts["bias"].draw()))


def test_an_input_that_is_a_weight_itself_gets_drawn_weights():
    """Its rows are no examples: their outputs share one weight and one bias."""

    def model(x, y=None):
        inputs = pyro.sample("inputs", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        bias = pyro.sample("bias", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        return F.linear(inputs, weight, bias)

    guide = ps.StructuredGuide(model, {"inputs": MeanField(), "*": JOINED})
    with DelayDraws():
        trace = poutine.trace(guide).get_trace(None)
    outputs = poutine.replay(model, trace=trace)(None)
    values = [trace.nodes[name]["value"].draw() for name in ("inputs", "weight", "bias")]
    torch.testing.assert_close(outputs, F.linear(*values))


def test_the_bias_of_another_layer_is_another_draw():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = ps.Regressor(ps.bayesianize(net), num_data=5, noise_scale=0.3)
    guide, args = make_guide(model), (torch.randn(5, 3), torch.randn(5, 3))
    guide.initialize(*args)
    with DelayDraws():
        nodes = poutine.trace(guide).get_trace(*args).nodes
    weight, bias = nodes["net.0.weight"]["value"], nodes["net.1.bias"]["value"]
    outputs = F.linear(args[0], weight, bias)
    torch.testing.assert_close(outputs, F.linear(args[0], weight.draw(), bias.draw()))


def test_a_weight_used_twice_is_one_draw_with_its_bias():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) - F.linear(x, self.weight)

    model = ps.Regressor(ps.bayesianize(Twice(3, 2)), num_data=5, noise_scale=0.3)
    guide, args = make_guide(model), (torch.randn(5, 3), torch.randn(5, 2))
    with DelayDraws():
        trace = poutine.trace(guide).get_trace(*args)
    outputs = poutine.replay(model, trace=trace)(*args)
    bias = trace.nodes["net.bias"]["value"]
    torch.testing.assert_close(outputs, bias.expand(5, 2))


def test_a_part_knows_its_shape_and_keeps_its_gradient():
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten())
    guide = make_guide(ps.Classifier(ps.bayesianize(net), num_data=5))
    args = torch.randn(5, 2, 3), torch.randint(4, (5,))
    guide.initialize(*args)
    with DelayDraws():
        nodes = poutine.trace(guide).get_trace(*args).nodes
    weight, bias = nodes["net.0.weight"]["value"], nodes["net.0.bias"]["value"]
    assert (weight.shape, bias.shape, weight.dtype) == ((4, 2, 3), (4,), torch.float64)
    assert not weight.whole.is_drawn
    (weight.sum() + bias.sum()).backward()
    assert guide["net.0.weight"].loc.grad.eq(1).all()
