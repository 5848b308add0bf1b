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


@dataclass(frozen=True)
class Narrow(KTied):
    """k-tied weights of at most four columns."""

    def fits(self, site):
        return super().fits(site) and site.shape[1] <= 4


WEIGHT, BIAS = "net.weight", "net.bias"
IS_JOINED = [
    # A layer, families, a weight and its bias, and whether they have one posterior.
    (nn.LSTM(3, 4), {"*": JOINED}, "net.weight_ih_l0", "net.bias_ih_l0", True),
    (nn.LSTM(3, 4), {"*": JOINED}, "net.weight_hh_l0", "net.bias_hh_l0", True),
    (nn.ConvTranspose1d(3, 2, 2), {"*": JOINED}, WEIGHT, BIAS, False),
    (nn.Linear(3, 2), {"*.weight": JOINED, "*": MeanField()}, WEIGHT, BIAS, True),
    (nn.Linear(3, 2), {"*.weight": JOINED}, WEIGHT, BIAS, True),
    (
        nn.Linear(3, 2),
        {"*.weight": KTied(1, join_bias=False), "*.bias": JOINED},
        WEIGHT,
        BIAS,
        False,
    ),
    (nn.Linear(3, 2), {"*.weight": JOINED, "*.bias": MeanField()}, WEIGHT, BIAS, False),
    (nn.Linear(3, 2), {BIAS: MeanField(), "*": JOINED}, WEIGHT, BIAS, False),
    (nn.Linear(3, 2), {"*": Narrow(1)}, WEIGHT, BIAS, True),
    (nn.Linear(4, 2), {"*": Narrow(1)}, WEIGHT, BIAS, False),
]


@pytest.mark.parametrize(("layer", "families", "weight", "bias", "is_joined"), IS_JOINED)
def test_the_families_decide_whether_a_bias_is_joined(layer, families, weight, bias, is_joined):
    guide = ps.StructuredGuide(ps.Classifier(ps.bayesianize(layer), num_data=5), families)
    assert (guide[bias] is guide[weight]) is is_joined
    if not is_joined:
        assert guide[weight]().event_shape == layer.get_parameter(weight.partition(".")[2]).shape
    if families.get("*.bias") == MeanField():
        assert isinstance(guide[bias].family, MeanField)


def test_a_family_that_fits_some_shapes_obeys_the_contract():
    for size in (3, 4):
        check_family(Narrow(1), (2, size))
    for layer in (nn.Linear(3, 2, bias=False), nn.Embedding(3, 2)):
        guide = make_guide(ps.Classifier(ps.bayesianize(layer), num_data=5))
        assert guide[WEIGHT]().event_shape == layer.weight.shape


def test_a_model_that_samples_only_one_of_both_is_an_error():
    guide = make_guide(layer_function("layer."))
    guide.initialize(*regression_data())
    assert guide["layer.weight"]().event_shape == (1, 4)
    message = r"'layer.weight' is joined with its bias 'layer.bias'.*samples only one.*`join_bias="
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


USES = {
    "without the bias": lambda x, w, b: F.linear(x, w) + b,
    "with another bias": lambda x, w, b: F.linear(x, w, b + 0),
    "by hand": lambda x, w, b: x @ w.T + b,
    "one after the other": lambda x, w, b: b + x @ w.T,
}


def delayed(guide, *args):
    """Return what a guide hands to a model, undrawn."""
    with DelayDraws():
        return poutine.trace(guide).get_trace(*args)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_other_use_sees_one_draw_of_both(use):
    model, args = linear_model()
    guide, x = make_guide(model), torch.randn(5, 3)
    guide.initialize(*args)
    nodes = delayed(guide, *args).nodes
    weight, bias = (nodes[name]["value"] for name in (WEIGHT, BIAS))
    outputs = use(x, weight, bias)
    assert isinstance(weight, LazySlice)
    assert weight.whole.is_drawn
    torch.testing.assert_close(outputs, F.linear(x, weight.draw(), bias.draw()))


def test_an_input_that_is_a_weight_itself_gets_drawn_weights():
    """Its rows are no examples: their outputs share one weight and one bias."""

    def model(x, y=None):
        shapes = {"inputs": (4, 2), "weight": (3, 2), "bias": (3,)}
        return F.linear(
            *(
                pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
                for name, shape in shapes.items()
            )
        )

    guide = ps.StructuredGuide(model, {"inputs": MeanField(), "*": JOINED})
    trace = delayed(guide, None)
    outputs = poutine.replay(model, trace=trace)(None)
    values = [trace.nodes[name]["value"].draw() for name in ("inputs", "weight", "bias")]
    torch.testing.assert_close(outputs, F.linear(*values))


def test_a_weight_used_twice_is_one_draw_with_its_bias_and_others_are_other_draws():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) - F.linear(x, self.weight)

    model = ps.Regressor(ps.bayesianize(Twice(3, 2)), num_data=5, noise_scale=0.3)
    guide, args = make_guide(model), (torch.randn(5, 3), torch.randn(5, 2))
    trace = delayed(guide, *args)
    outputs = poutine.replay(model, trace=trace)(*args)
    torch.testing.assert_close(outputs, trace.nodes[BIAS]["value"].expand(5, 2))
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model, args = ps.Regressor(ps.bayesianize(net), 5, 0.3), (torch.randn(5, 3),) * 2
    guide = make_guide(model)
    guide.initialize(*args)
    nodes = delayed(guide, *args).nodes
    weight, bias = nodes["net.0.weight"]["value"], nodes["net.1.bias"]["value"]
    outputs = F.linear(args[0], weight, bias)
    torch.testing.assert_close(outputs, F.linear(args[0], weight.draw(), bias.draw()))


def test_a_part_knows_its_shape_and_keeps_its_gradient():
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten())
    guide = make_guide(ps.Classifier(ps.bayesianize(net), num_data=5))
    args = torch.randn(5, 2, 3), torch.randint(4, (5,))
    guide.initialize(*args)
    nodes = delayed(guide, *args).nodes
    weight, bias = nodes["net.0.weight"]["value"], nodes["net.0.bias"]["value"]
    assert (weight.shape, bias.shape, weight.dtype) == ((4, 2, 3), (4,), torch.float64)
    assert not weight.whole.is_drawn
    (weight.sum() + bias.sum()).backward()
    assert guide["net.0.weight"].loc.grad.eq(1).all()
