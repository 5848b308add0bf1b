"""Nets under Pyro's own vectorized particles, and under Predictive(parallel=True)."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn

import pyro_structvi as ps
from pyro_structvi.nn.likelihood import run_in_plates
from tests import models
from tests.guide_cases import GUIDES
from tests.models import make_image_classifier, regression_data

NAMES = [name for name in GUIDES if name != "inducing weights, ensemble"]


def make_regressor(prior=1.0, noise_scale=0.3):
    return models.make_regressor(12, prior, noise_scale), regression_data()


make_noisy_regressor = partial(make_regressor, noise_scale=dist.HalfNormal(1.0))
make_hierarchical_regressor = partial(make_regressor, ps.HierarchicalScale(dist.HalfNormal(1.0)))
MODELS = [make_image_classifier, make_regressor, make_noisy_regressor]


def make_conditioned_regressor():
    """A model with one bias and one noise for all particles, as many targets as there are."""
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 4)), 12, dist.HalfNormal(torch.ones(4)))
    values = {"net.bias": torch.randn(4), "noise_scale": torch.rand(4) + 0.1}
    return poutine.condition(model, values), (torch.randn(12, 3), torch.randn(12, 4))


@pytest.mark.parametrize(
    ("guide_name", "make_model"),
    [
        *(("k-tied, joined", make) for make in MODELS),
        *(("low rank", make) for make in (make_regressor, make_conditioned_regressor)),
    ],
)
def test_the_loss_of_particles_in_plates_is_that_of_each_alone(guide_name, make_model):
    """The vectorized loss, and log q - log p of each particle's draws, one after another."""
    model, data = make_model()
    guide = GUIDES[guide_name](model, init_scale=0.2)
    guide.initialize(*data)
    objective = RecordsDraws(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    with torch.no_grad():
        loss = objective.loss(model, guide, *data)
        alone = []
        for number in range(4):
            values = {name: draw[number].squeeze(0) for name, draw in objective.draws.items()}
            densities = [
                poutine.trace(poutine.condition(part, values)).get_trace(*data).log_prob_sum()
                for part in (guide, model)
            ]
            alone.append(densities[0] - densities[1])
    assert loss == pytest.approx(torch.stack(alone).mean().item())
    assert torch.stack(alone).std() > 0.01


class RecordsDraws(Trace_ELBO):
    def _get_trace(self, *args):
        model_trace, guide_trace = super()._get_trace(*args)
        self.draws = {
            name: site["value"]
            for name, site in guide_trace.nodes.items()
            if site["type"] == "sample"
        }
        return model_trace, guide_trace


@pytest.mark.parametrize(
    ("guide_name", "make_model"),
    [
        *((name, make_image_classifier) for name in NAMES),
        *(("low rank", make) for make in (make_noisy_regressor, make_hierarchical_regressor)),
    ],
)
def test_outputs_in_parallel_are_those_of_each_draw_alone(guide_name, make_model):
    model, (x, _) = make_model()
    guide = GUIDES[guide_name](model, init_scale=0.2)
    guide.initialize(x)
    sites = [*guide.site_names, "_RETURN", "obs"]
    together = Predictive(model, guide=guide, num_samples=5, parallel=True, return_sites=sites)(x)
    values = {name: together[name].squeeze(1) for name in guide.site_names}
    apart = Predictive(model, values, return_sites=["_RETURN"])(x)["_RETURN"]
    torch.testing.assert_close(together["_RETURN"].reshape(apart.shape), apart)
    assert together["obs"].shape[:2] == (5, len(x))
    assert (apart[0] != apart[1]).all()


@pytest.mark.parametrize(
    ("make_guide", "message"),
    [
        (lambda model: ps.EnsembleGuide(model, 4), "are drawn together, once for all particles"),
        (
            lambda model: ps.InducingWeightGuide(model, (3, 2), "full", shared=True),
            "are drawn together, once for all particles",
        ),
        (ps.MCDropoutGuide, "Weights with dropout have no batches"),
    ],
)
def test_guides_that_draw_once_are_refused(make_guide, message):
    """Pyro's plate of parallel predictions is at the data's dimension: all draws would be one."""
    model, data = make_regressor()
    guide = make_guide(model)
    guide.initialize(*data)
    objective = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
    with pytest.raises(NotImplementedError, match=message):
        objective.loss(model, guide, *data)
    with pytest.raises(NotImplementedError, match=message):
        Predictive(model, guide=guide, num_samples=5, parallel=True)(data[0])


class ReadsAfterwards(PyroModule):
    """A model that looks at a weight after its net was run."""

    def __init__(self):
        super().__init__()
        self.net = ps.bayesianize(nn.Linear(3, 1))

    def forward(self, x):
        outputs, plates = run_in_plates(self.net, lambda: self.net(x))
        mean = outputs.squeeze(-1) + 0 * self.net.weight.flatten(plates).sum(-1, keepdim=True)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, 1.0))
        return mean


def test_a_weight_can_be_looked_at_after_the_net():
    model, x = ReadsAfterwards(), torch.randn(4, 3)
    guide = ps.MeanFieldGuide(model, init_scale=0.2)
    guide.initialize(x)
    draws = Predictive(model, guide=guide, num_samples=5, parallel=True, return_sites=["_RETURN"])
    assert draws(x)["_RETURN"].shape == (5, 4)


class HasGroups(PyroModule):
    """A model with a plate of groups beside its net, so that a guide draws in one plate more."""

    def __init__(self, prior, calls):
        super().__init__()
        self.net, self.calls = ps.bayesianize(nn.Linear(3, 1), prior), calls

    def forward(self, x, y=None):
        mean = self.calls(self.net, x).squeeze(-1)
        with pyro.plate("groups", 2):
            shift = pyro.sample("shift", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            mean = mean + shift.reshape(2)[torch.arange(len(x)) % 2]
            pyro.sample("obs", dist.Normal(mean, 0.5), obs=y, infer={"is_observation": True})
        return mean


@pytest.mark.parametrize("prior", [1.0, ps.HierarchicalScale(dist.HalfNormal(1.0))])
@pytest.mark.parametrize("guide", [AutoNormal, ps.MeanFieldGuide])
@pytest.mark.parametrize(
    "calls",
    [lambda net, x: net(x), lambda net, x: run_in_plates(net, lambda: net(x))[0]],
    ids=["direct", "run_in_plates"],
)
def test_draws_one_by_one_with_ones_for_the_plates_of_a_guide(prior, guide, calls):
    model, x = HasGroups(prior, calls), torch.randn(4, 3)
    guide = guide(model)
    guide(x, torch.randn(4))
    sites = ["net.weight", "net.bias", "shift", "_RETURN"]
    draws = Predictive(model, guide=guide, num_samples=5, return_sites=sites)(x)
    assert draws["net.weight"].shape == (5, 1, 1, 3)
    weight, bias, shift, found = (value.reshape(5, -1) for value in draws.values())
    torch.testing.assert_close(found, weight @ x.mT + bias + shift[:, torch.arange(4) % 2])


class CallsInside(PyroModule):
    """A model that calls its net inside of the plate of the data."""

    def __init__(self, prior):
        super().__init__()
        self.net = ps.bayesianize(nn.Linear(3, 1).double(), prior)

    def forward(self, x):
        with pyro.plate("data", len(x)):
            mean = self.net(x).squeeze(-1)
            pyro.sample("obs", dist.Normal(mean, 1.0), infer={"is_observation": True})
        return mean


class Parts:
    """A holder of a net that is no module, so that a function of it is a model of its own."""

    def __init__(self, net):
        self.net = net


@pytest.mark.parametrize("prior", [1.0, {"bias": 1.0, "*": None}])
@pytest.mark.parametrize("is_module", [True, False])
def test_a_net_inside_of_a_plate_draws_no_weights_for_each_example(prior, is_module):
    model, x = CallsInside(prior), torch.randn(4, 3).double()
    draws = {"net.bias" if is_module else "bias": torch.full((5, 1), 7.0).double()}
    if not is_module:
        model = partial(CallsInside.forward, Parts(model.net))
    runs = [
        lambda: AutoNormal(model)(x),
        lambda: ps.predict(model, draws, x),
        lambda: Predictive(model, num_samples=3, parallel=True)(x),
    ]
    for run in runs if is_module else [*runs, lambda: ps.MeanFieldGuide(model)(x)]:
        with pytest.raises(ValueError, match="must not be called inside of the plate 'data'"):
            run()


def test_a_net_inside_of_a_plate_takes_given_values():
    """They come from a handler, or from the guide of a module, which draws in front of the plate."""
    model, x = CallsInside({"bias": 1.0, "*": None}), torch.randn(4, 3).double()
    draws = {"net.bias": torch.randn(5, 1).double()}
    expected = (x @ model.net.weight.T).squeeze(-1) + draws["net.bias"]
    given = poutine.condition(model, {"net.bias": draws["net.bias"][0]})(x)
    torch.testing.assert_close(given, expected[0])
    ps.MeanFieldGuide(model)
    torch.testing.assert_close(ps.predict(model, draws, x).mean, expected.mean(0))
    drawn = Predictive(model, num_samples=5, return_sites=["net.bias", "_RETURN"])(x)
    bias = drawn["net.bias"].squeeze(1)
    torch.testing.assert_close(drawn["_RETURN"], expected - draws["net.bias"] + bias)


def test_a_plate_of_groups_has_one_net_per_member():
    net, x = ps.bayesianize(nn.Linear(3, 2).double()), torch.randn(4, 3).double()

    def model():
        with pyro.plate("groups", 5, dim=-2):
            return run_in_plates(net, lambda: net(x))[0]

    trace = poutine.trace(model).get_trace()
    weight, bias = (trace.nodes[name]["value"] for name in ("weight", "bias"))
    assert weight.shape == (5, 1, 2, 3)
    expected = torch.einsum("goi,ni->gno", weight[:, 0], x) + bias
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)


def test_a_net_between_two_blocks_of_a_plate_has_one_draw():
    """The way of a decoder, whose inputs are latents of the plate."""
    net, y = ps.bayesianize(nn.Linear(2, 3).double()), torch.randn(4, 3).double()

    def model(y):
        data = pyro.plate("data", len(y))
        with data:
            z = pyro.sample("z", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
        mean = net(z)
        with data:
            pyro.sample("obs", dist.Normal(mean, 1.0).to_event(1), obs=y)
        return mean

    guide = ps.MeanFieldGuide(model)
    draw = poutine.trace(guide).get_trace(y)
    values = {name: draw.nodes[name]["value"] for name in ("z", "weight", "bias")}
    assert [value.shape for value in values.values()] == [(4, 2), (3, 2), (3,)]
    mean = poutine.replay(model, trace=draw)(y)
    torch.testing.assert_close(mean, nn.functional.linear(*values.values()))
