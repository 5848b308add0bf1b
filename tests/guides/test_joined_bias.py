"""Biases joined to their weights: one joint posterior, two sites of the model."""

from contextlib import nullcontext
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, KTied, LowRank, MeanField
from pyro_structvi.sites.finding import UnusedSiteWarning
from pyro_structvi.sites.parameterization import parameters_of_rows
from pyro_structvi.testing import check_family
from pyro_structvi.weights.lazy import DelayDraws, LazySlice
from tests import dense_oracles as dense
from tests.models import make_regressor, regression_data
from tests.unit_noise import exact_mean

JOINED = LowRank(rank=2, diagonal="full", join_bias=True)
APART = KTied(1, join_bias=False)


def make_guide(model=None, init_scale=0.4, family=JOINED, **options):
    return ps.StructuredGuide(
        make_regressor() if model is None else model,
        {"*": family},
        init_scale=init_scale,
        **options,
    )


def linear_model(out=2, size=12, **priors):
    """Return a linear layer with unlike priors of weight and bias, and data for it."""
    priors = {"weight": 0.7, "bias": 1.5} | priors
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, out), prior=priors), size, noise_scale=0.5)
    return model, (torch.randn(size, 3), torch.randn(size, out))


def layer_function(prefix="", around=nullcontext):
    """Return a plain function with one layer, whose weight is sampled in a context."""

    def model(x, y=None, with_bias=True):
        bias = None
        with around():
            prior = dist.Normal(torch.zeros(1, 3), 1.0).to_event(2)
            weight = pyro.sample(f"{prefix}weight", prior)
        if with_bias:
            bias = pyro.sample(f"{prefix}bias", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(F.linear(x, weight, bias), 1.0).to_event(1), obs=y)

    return model


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
    (nn.Linear(3, 2), {"*.weight": JOINED}, WEIGHT, BIAS, True),
    (nn.Linear(3, 2), {"*.weight": APART, "*.bias": JOINED}, WEIGHT, BIAS, False),
    (nn.Linear(3, 2), {"*.weight": JOINED, "*.bias": MeanField()}, WEIGHT, BIAS, False),
    (nn.Linear(3, 2), {BIAS: MeanField(), "*": JOINED}, WEIGHT, BIAS, False),
    (nn.Linear(3, 2), {"*": Narrow(1)}, WEIGHT, BIAS, True),
    (nn.Linear(4, 2), {"*": Narrow(1)}, WEIGHT, BIAS, False),
]


@pytest.mark.parametrize(("layer", "families", "weight", "bias", "is_joined"), IS_JOINED)
def test_the_families_decide_whether_a_bias_is_joined(layer, families, weight, bias, is_joined):
    guide = ps.StructuredGuide(ps.Classifier(ps.bayesianize(layer), num_data=5), families)
    shape = layer.get_parameter(weight.partition(".")[2]).shape
    assert (guide[bias] is guide[weight]) is is_joined
    assert guide[weight]().event_shape == ((shape[0], shape[1] + 1) if is_joined else shape)
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
    outputs.sum().backward()
    gradient = F.pad(x, (0, 1), value=1.0).sum(0).expand(2, -1)
    torch.testing.assert_close(guide[WEIGHT].loc.grad, gradient)


def test_an_input_that_is_a_weight_itself_gets_drawn_weights():
    """Its rows are no examples: their outputs share one weight and one bias."""

    def normal(name, *shape):
        return pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))

    def model(x, y=None):
        return F.linear(normal("inputs", 4, 2), normal("weight", 3, 2), normal("bias", 3))

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


def expected_kl(q, weight_scale, bias_scale):
    """Return the dense divergence from the priors of weight and bias, beside each other."""
    weight, bias = torch.as_tensor(weight_scale), torch.as_tensor(bias_scale)
    scale = torch.cat([weight.expand(2, 3), bias.expand(2).unsqueeze(-1)], -1)
    own = q.loc, q.covariance_matrix, torch.zeros(2, 4), scale
    return dense.kl_to_independent_normals(*own, event_dim=2)


@pytest.mark.parametrize(
    ("weight_scale", "bias_scale"),
    [(0.7, 1.5), (torch.rand(2, 3) + 0.5, 0.7), (0.7, torch.tensor([0.5, 2.0]))],
    ids=["one", "many weights", "many biases"],
)
def test_the_kl_is_the_dense_one(weight_scale, bias_scale):
    model, args = linear_model(weight=weight_scale, bias=bias_scale)
    guide = make_guide(model)
    terms = ps.StructuredELBO().terms(model, guide, *args)
    expected = expected_kl(guide["net.weight"](), weight_scale, bias_scale)
    torch.testing.assert_close(terms.kl, {"net.weight+bias": expected})
    assert terms.sampled == ()


@pytest.mark.parametrize(
    ("elbo_class", "family"),
    [
        (ps.StructuredELBO, JOINED),
        (ps.StructuredELBO, KTied(2, join_bias=True)),
        (TraceMeanField_ELBO, JOINED),
        (Trace_ELBO, JOINED),
    ],
)
def test_every_elbo_has_the_closed_forms_mean(elbo_class, family):
    model, (x, y) = linear_model()
    guide = make_guide(model, init_scale=0.3, family=family)
    guide.initialize(x, y)
    q = guide["net.weight"]()
    image = q.image(F.pad(x, (0, 1), value=1.0))
    likelihood = dist.Normal(image.mean, 0.5).log_prob(y).sum() - 2 * image.variance.sum()
    mean = exact_mean(lambda: torch.tensor(elbo_class().loss(model, guide, x, y)))
    expected = (expected_kl(q, 0.7, 1.5) - likelihood).detach()
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:Found .*vars in:UserWarning")
def test_a_model_with_half_of_a_joint_site_is_an_error():
    model, args = linear_model()
    guide = make_guide(model)
    guide.initialize(*args)
    for half in (
        poutine.block(model, hide=["net.bias"]),
        poutine.block(model, hide=["net.weight"]),
        poutine.condition(model, {"net.bias": torch.zeros(2)}),
    ):
        with pytest.raises(ValueError, match=r"'net.weight' and its bias 'net.bias', but the mo"):
            ps.StructuredELBO().terms(half, guide, *args)


@pytest.mark.filterwarnings("ignore:Found .*vars in:UserWarning")
def test_what_has_no_closed_form_is_sampled_and_said():
    message = r"\['net.weight\+bias'\]"
    model, args = linear_model(bias=dist.StudentT(3.0, 0.0, 1.0))
    with pytest.warns(ps.infer.SampledKLWarning, match=message):
        ps.StructuredELBO().terms(model, make_guide(model), *args)
    model, args = linear_model()
    guide = make_guide(model)
    guide.initialize(*args)
    empty = poutine.block(model, hide=["net.weight", "net.bias"])  # a layer that a pass skips
    with pytest.warns(ps.infer.SampledKLWarning, match=message):
        assert ps.StructuredELBO().terms(empty, guide, *args).sampled == ("net.weight+bias",)


@pytest.mark.parametrize(("parent", "child"), [("weight", "bias"), ("bias", "weight")])
@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_a_prior_given_the_other_site_takes_the_joint_draw(parent, child):
    """A closed form would take the marginals of the two: a Gaussian of one layer has its evidence."""
    sites = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}

    def model(x, y):
        own = {parent: pyro.sample(parent, dist.Normal(sites[parent], 1.0).to_event())}
        loc = own[parent].sum() + sites[child]
        own[child] = pyro.sample(child, dist.Normal(loc, 0.5).to_event())
        mean = F.linear(x, own["weight"], own["bias"]).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, 1.0), obs=y)

    x, y = torch.randn(4, 3), torch.randn(4)
    guide = make_guide(model, family=FullCovariance())
    guide.initialize(x, y)
    own, other = (torch.eye(4)[:3], torch.eye(4)[3:])[:: 1 if parent == "weight" else -1]
    given = other - own.sum(0) if parent == "weight" else other - own
    prior, design = own.mT @ own + 4 * given.mT @ given, torch.cat([x, torch.ones(4, 1)], 1)
    exact = dist.MultivariateNormal(
        torch.zeros(4), torch.eye(4) + design @ prior.inverse() @ design.mT
    )
    covariance = (prior + design.mT @ design).inverse()
    loc, posterior = (covariance @ design.mT @ y).unsqueeze(0), guide["weight"]
    factor = torch.linalg.cholesky(covariance)
    with torch.no_grad():
        for name, value in {"loc": loc, **parameters_of_rows(factor, loc)}.items():
            posterior.value(name).copy_(value)
    for _ in range(3):
        bound = ps.StructuredELBO().terms(model, guide, x, y).elbo
        torch.testing.assert_close(bound, exact.log_prob(y), rtol=1e-8, atol=1e-8)


def test_scale_and_mask_of_weight_and_bias_must_be_one():
    model = layer_function(around=lambda: poutine.mask(mask=torch.tensor(True)))
    assert ps.StructuredELBO().terms(model, make_guide(model), *regression_data()).kl
    model = layer_function(around=lambda: poutine.scale(scale=2.0))
    message = r"sites 'weight' and 'bias' have one posterior, and so must have one scale"
    with pytest.raises(ValueError, match=message):
        ps.StructuredELBO().terms(model, make_guide(model), *regression_data())
