"""The interface of Pyro's automatic guides."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import (
    JitTrace_ELBO,
    JitTraceMeanField_ELBO,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoGuide, AutoGuideList, AutoNormal
from torch import nn
from torch.distributions import Normal

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance
from tests.guides.autoguide_models import GUIDES, NORMAL, PROBS, every_guide, train
from tests.models import make_regressor, regression_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:No closed-form KL"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def make_model():
    return make_regressor(noise_scale=dist.HalfNormal(1.0))


# ---- the interface -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_guide", NORMAL.values(), ids=NORMAL)
def test_quantiles_are_those_of_the_dense_normal(make_guide):
    guide = make_guide(make_model(), init_scale=0.3)
    quantiles = guide.quantiles(torch.tensor(PROBS))
    for posterior in guide.posteriors.values():
        q, site = posterior(), posterior.site
        if site.name == "noise_scale":
            continue
        scale = q.covariance_matrix.diagonal().sqrt().reshape(q.event_shape)
        expected = Normal(q.mean, scale).icdf(torch.tensor(PROBS).reshape(-1, *[1] * q.mean.dim()))
        for name, values in site.split(expected).items():
            torch.testing.assert_close(quantiles[name], values, rtol=1e-4, atol=1e-5)
    noise = guide["noise_scale"]()
    expected = Normal(noise.base_dist.mean, noise.base_dist.stddev).icdf(torch.tensor(PROBS)).exp()
    torch.testing.assert_close(quantiles["noise_scale"], expected)


def test_quantiles_of_points_and_their_mixtures():
    model = make_model()
    guide = ps.MAPGuide(model)
    for name, values in guide.quantiles(PROBS).items():
        assert torch.equal(values, guide.median()[name].expand_as(values))
    guide = ps.EnsembleGuide(model, 5)
    members = torch.stack([each.median()["net.0.weight"] for each in guide.members])
    expected = members.sort(0).values[[0, 2, 4]]
    assert torch.equal(guide.quantiles([0.0, 0.5, 1.0])["net.0.weight"], expected)
    guide = ps.MCDropoutGuide(model, rate=0.3)
    draws = torch.stack([guide.draw()["net.0.weight"] for _ in range(400)])
    found = guide.quantiles([0.1, 0.9])["net.0.weight"]
    torch.testing.assert_close(found, draws.quantile(torch.tensor([0.1, 0.9]), 0))
    guide = ps.InducingWeightGuide(model, (2, 2), "ensemble", init_scale=0.3)
    q, found = guide["net.0.weight"](), guide.quantiles(PROBS)
    values = torch.cat([found["net.0.weight"], found["net.0.bias"].unsqueeze(-1)], -1)
    given = [q.condition(member) for member in q.inducing.members]
    cdf = sum(Normal(each.mean, each.variance.sqrt()).cdf(values) for each in given) / len(given)
    torch.testing.assert_close(cdf, torch.tensor(PROBS).reshape(-1, 1, 1).expand_as(cdf))


def test_quantiles_rise_on_every_support():
    for support, back in (
        (constraints.less_than(1.0), lambda values: (1 - values).log().flip(0)),
        (constraints.interval(-1.0, 3.0), lambda values: ((values + 1) / 4).logit()),
    ):
        prior = dist.ImproperUniform(support, (), (2,))
        guide = ps.MeanFieldGuide(lambda prior=prior: pyro.sample("z", prior), init_scale=0.5)
        guide.initialize()
        expected = Normal(guide["z"].loc, 0.5).icdf(torch.tensor([[0.2], [0.8]]))
        torch.testing.assert_close(back(guide.quantiles([0.2, 0.8])["z"]), expected)


def test_quantiles_are_of_probabilities_and_known_distributions():
    for wrong in ([0.5, -0.1], [float("nan")]):
        with pytest.raises(ValueError, match="`quantiles` must be numbers from 0 to 1"):
            ps.MeanFieldGuide(make_model()).quantiles(wrong)
    guide = ps.InducingWeightGuide(make_model(), (2, 2), FullCovariance(), shared=True)
    with pytest.raises(NotImplementedError, match=r"'net.0.weight', 'net.2.weight'.*guide.draw()"):
        guide.quantiles([0.5])
    half = ps.Regressor(ps.bayesianize(nn.Linear(3, 2).bfloat16(), prior=1.0), 12, 0.3)
    for name in ("k-tied", "ensemble"):
        found = GUIDES[name](half).quantiles([0.1, 0.9])["net.weight"]
        assert found.dtype == torch.float32
        assert bool(torch.isfinite(found).all())


# ---- among Pyro's guides -------------------------------------------------------------------------


@every_guide
def test_a_guide_is_a_part_of_a_list(make_guide):
    model, data = make_model(), regression_data()
    first = ["net.0.weight", "net.0.bias"]

    def make():
        guide = AutoGuideList(model)
        guide.append(make_guide(poutine.block(model, expose=first), init_scale=0.3))
        guide.append(AutoNormal(poutine.block(model, hide=first)))
        return guide

    guide = make()
    for elbo in (Trace_ELBO(), ps.StructuredELBO()):
        assert all(loss == loss for loss in train(model, guide, elbo, data))
    names = {*first, "net.2.weight", "net.2.bias", "noise_scale"}
    assert guide.median(*data).keys() == guide.quantiles(PROBS, *data).keys() == names
    assert guide[0].is_initialized
    other = make()
    other(*data)
    other.load_state_dict(guide.state_dict())
    for name, value in guide.median().items():
        assert torch.equal(other.median()[name], value)


def test_parts_of_a_list_stand_in_one_plate():
    def model(y):
        with pyro.plate("data", len(y)):
            first = pyro.sample("first", dist.Normal(0.0, 1.0))
            second = pyro.sample("second", dist.Normal(0.0, 1.0))
            pyro.sample("obs", dist.Normal(first + second, 1.0), obs=y)

    guide = AutoGuideList(model, create_plates=lambda y: pyro.plate("data", len(y)))
    guide.append(ps.MeanFieldGuide(poutine.block(model, hide=["second"])))
    guide.append(AutoNormal(poutine.block(model, hide=["first"])))
    y = torch.randn(5)
    train(model, guide, Trace_ELBO(), (y,))
    assert {name: value.shape for name, value in guide.median().items()} == {
        "first": (5,),
        "second": (5,),
    }
    wrong = AutoGuideList(model)
    wrong.append(ps.MeanFieldGuide(model, create_plates=lambda y: pyro.plate("data", len(y))))
    with pytest.raises(ValueError, match="`create_plates` must be None for a guide in an Auto"):
        wrong(y)


@every_guide
def test_a_guide_answers_as_pyros_and_has_copies(make_guide):
    model, data = make_model(), regression_data()
    guide = make_guide(model, init_scale=0.3)
    assert isinstance(guide, AutoGuide)
    median, quantiles = guide.median(*data), guide.quantiles(PROBS, *data)
    assert median.keys() == quantiles.keys() == set(guide.site_names)
    assert guide.is_initialized
    drawn = guide(*data)
    shapes = [drawn[name].shape for name in sorted(drawn)]
    assert [each.shape for each in guide.call(*data)] == shapes
    train(model, guide, Trace_ELBO(), data)
    file = io.BytesIO()
    torch.save(guide, file)
    file.seek(0)
    unpickled = pickle.loads(pickle.dumps(guide)), torch.load(file, weights_only=False)
    copies, median = [copy.deepcopy(guide), *unpickled], guide.median()
    for each in copies:
        assert all(torch.equal(each.median()[name], value) for name, value in median.items())
    assert [each.model for each in copies] == [model, None, None]
    assert Predictive(model, guide=guide, num_samples=3)(data[0])["obs"].shape == (3, 12, 1)


def assert_compiled_is_eager(compiled, eager, model, guide, data):
    """Compare losses and gradients of one seed, after the call that compiles."""
    found = []
    for objective in (eager, compiled):
        objective.loss_and_grads(model, guide, *data)
        guide.zero_grad()
        pyro.set_rng_seed(3)
        value = objective.loss_and_grads(model, guide, *data)
        gradients = [p.grad.flatten() for p in guide.parameters() if p.grad is not None]
        found.append(torch.cat([torch.tensor([value]), *gradients]))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


def latents_in_a_plate(x, y):
    with pyro.plate("groups", 4):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 12):
        pyro.sample("obs", dist.Normal(shift.sum(-1, True), 1.0), obs=y[:, 0])


EXPANDING = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1}
MODELS = {"net": make_model, "plate": lambda: latents_in_a_plate}
ALONE = [("inducing weights", "net"), ("inducing ensemble", "net")]
EXPANDED = [*((name, "net") for name in (*NORMAL, "points")), ("mean field", "plate")]
TRACED = GUIDES | {
    "inducing ensemble": lambda model, **options: ps.InducingWeightGuide(
        model, (2, 2), "ensemble", **options
    )
}


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        *((*case, {}) for case in ALONE),
        *((*case, EXPANDING) for case in (*EXPANDED, ("points", "plate"))),
    ],
)
def test_pyros_compiled_objective_has_the_eager_gradients(name, make, options):
    """Sites are expanded by the plate of particles, or by one of the model."""
    model, data = MODELS[make](), regression_data()
    objectives = [each(**options) for each in (JitTrace_ELBO, Trace_ELBO)]
    guide = TRACED[name](model, init_scale=0.3)
    assert_compiled_is_eager(*objectives, model, guide, data)
    if name == "mean field":  # at draws that do not differ, since it takes noise in another order
        guide = ps.MeanFieldGuide(model, init_scale=1e-9)
        both = [each(**options) for each in (JitTraceMeanField_ELBO, TraceMeanField_ELBO)]
        losses = [objective.loss_and_grads(model, guide, *data) for objective in both]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        with pytest.raises(NotImplementedError, match="draws a member in each call"):
            train(model, GUIDES["ensemble"](model), JitTrace_ELBO(), data)
