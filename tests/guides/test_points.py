"""Guides of points and mixtures: maximum a posteriori, ensembles, dropout, several basins."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import MeanField, Subnetwork
from pyro_structvi.testing.noise import assert_mean
from tests.infer.test_engines import trace_at_once
from tests.models import (
    hierarchical_function,
    linear_function,
    make_classifier,
    make_regressor,
    regression_data,
)
from tests.unit_noise import close


def map_loss(model, values, *data):
    """Return minus the log joint density of a model at values of its sites."""
    return -poutine.trace(poutine.condition(model, values)).get_trace(*data).log_prob_sum()


# ---- maximum a posteriori ------------------------------------------------------------------------


def test_the_loss_is_that_of_maximum_a_posteriori_under_every_objective():
    model, data = make_regressor(prior=0.7), regression_data(6)
    guide = ps.MAPGuide(model)
    expected = map_loss(model, guide.draw(), *data)
    for elbo in (ps.StructuredELBO(), Trace_ELBO(), TraceMeanField_ELBO()):
        close(torch.tensor(elbo.loss(model, guide, *data)), expected.detach())
    # A hierarchical scale has no closed form with any other posterior, and would be warned of.
    for guide in (ps.MAPGuide(hierarchical_function), ps.EnsembleGuide(hierarchical_function, 2)):
        assert ps.StructuredELBO().terms(hierarchical_function, guide, *data).sampled == ()


def test_constrained_sites_are_points_of_their_own_space():
    """Their loss is the density itself, not that in the unconstrained space."""
    prior = dist.Gamma(3.0, torch.tensor(2.0))
    model = lambda: pyro.sample("rate", prior)  # noqa: E731
    guide = ps.MAPGuide(model)
    guide.initialize()
    close(ps.StructuredELBO()(model, guide)(), -prior.log_prob(guide.draw()["rate"]))


@pytest.mark.parametrize("make_guide", [ps.MAPGuide, ps.MCDropoutGuide])
def test_a_module_may_keep_a_value_of_a_site(make_guide):
    """A parameter would become one of the module's own, which takes no other value."""

    class Keeping(pyro.nn.PyroModule):
        def forward(self):
            self.shift = pyro.sample("shift", dist.Normal(0.0, 1.0))

    model = Keeping()
    guide = make_guide(model)
    Trace_ELBO().loss_and_grads(model, guide)
    assert not [*model.parameters()]
    assert all(own.grad is not None for own in guide.parameters())
    model()  # from the prior


# ---- ensembles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorize", [True, False])
def test_the_loss_of_an_ensemble_is_the_mean_over_its_members(vectorize):
    model, data = make_regressor(prior=0.7), regression_data(6)
    guide = ps.EnsembleGuide(model, size=3, vectorize=vectorize)
    loss = ps.StructuredELBO().differentiable_loss(model, guide, *data)
    each = torch.stack([map_loss(model, own.draw(), *data) for own in guide.members])
    close(loss, each.mean())
    parameters = [*guide.parameters()]
    gradients = [torch.autograd.grad(value, parameters) for value in (loss, each.mean())]
    for own, exact in zip(*gradients, strict=True):
        close(own, exact)
    # Other objectives train one member at a time.
    losses = torch.tensor([Trace_ELBO().loss(model, guide, *data) for _ in range(100)])
    assert ((losses.unsqueeze(-1) - each).abs().amin(-1) < 1e-8).all()
    assert_mean(losses.unsqueeze(-1), each.mean().reshape(1))
    function, data = ps.EnsembleGuide(linear_function, 4), (torch.randn(12, 3), torch.randn(12, 2))
    ps.StructuredELBO().loss_and_grads(linear_function, function, *data)  # the first step
    assert all((each["weight"].loc.grad != 0).all() for each in function.members)


def test_predictions_use_every_member_once():
    model, (x, _) = make_classifier(), regression_data(7)
    guide = ps.EnsembleGuide(model, size=3)
    prediction = ps.predict(model, guide, x)
    logits = torch.stack([member.to_net()(x) for member in guide.members])
    close(prediction.functions, logits.detach())
    close(prediction.mean, logits.softmax(-1).mean(0).detach())
    again = ps.predict(model, guide, x, num_samples=6)
    close(again.functions, prediction.functions.repeat(2, 1, 1))


def test_members_start_at_the_net_and_at_its_elements_in_random_order():
    net = nn.Linear(60, 60)
    nn.init.constant_(net.bias, 0.5)
    guide = ps.EnsembleGuide(ps.Classifier(ps.bayesianize(net), 9), size=20)
    each = [member.median() for member in guide.members]
    weights, biases = (torch.stack([m[f"net.{name}"] for m in each]) for name in ("weight", "bias"))
    own = net.weight.detach()
    assert torch.equal(weights[0], own)
    torch.testing.assert_close(biases, net.bias.expand(20, -1), rtol=0.05, atol=0)
    elements = own.flatten().sort().values.expand(20, -1)
    torch.testing.assert_close(weights.flatten(1).sort(-1).values, elements, rtol=0, atol=5e-3)
    products = (weights[1:] * own).flatten(1).mean(-1, keepdim=True)
    assert_mean(products, own.mean().square().reshape(1))
    assert len({tuple(each.flatten().tolist()) for each in weights}) == 20


def test_sites_in_plates_have_members_too():
    def model(x, y=None):
        with pyro.plate("features", 3):
            weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(x @ weight, 0.5), obs=y)

    x, y = regression_data()
    guide = ps.EnsembleGuide(model, size=4)
    ps.fit(model, guide, (x, y[:, 0]), num_steps=3, lr=0.05, progress=False)
    assert guide.num_members == 4
    assert len({guide.draw(number=number)["weight"] for number in range(4)}) == 4


def test_particles_average_the_masks_of_a_nets_own_dropout():
    net = nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.5), nn.Linear(20, 1))
    model = ps.Regressor(ps.bayesianize(net), 12, 0.5)
    guide, data = ps.EnsembleGuide(model, 2), regression_data()
    spread = {}
    for particles in (1, 16):
        elbo = ps.StructuredELBO(num_particles=particles)
        spread[particles] = torch.tensor([elbo.loss(model, guide, *data) for _ in range(60)]).std()
    assert spread[16] < 0.5 * spread[1]


def test_what_is_wrong_with_a_model_is_said_of_the_model():
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(F.linear(x, weight), 0.5), obs=y)

    guide = ps.EnsembleGuide(model, 2)
    with pytest.raises(ValueError, match="invalid log_prob shape"):
        ps.StructuredELBO().loss(model, guide, *regression_data())
    net = make_regressor()
    guide = ps.EnsembleGuide(net, 2)
    guide.initialize(*regression_data())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ps.StructuredELBO().loss(net, guide, *regression_data(inputs=4))


def test_a_net_that_cannot_be_vectorized_says_so_and_trains_without():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model = ps.Classifier(ps.bayesianize(net, normalization=False), 12)
    data = torch.randn(12, 3), torch.randint(2, (12,))
    with pytest.raises(RuntimeError, match=r"in one pass: .*`vectorize=False`"):
        ps.fit(model, ps.EnsembleGuide(model, 2), data, num_steps=1, progress=False)
    guide = ps.EnsembleGuide(model, 2, vectorize=False)
    ps.fit(model, guide, data, num_steps=2, progress=False)


@pytest.mark.parametrize("make_guide", [ps.EnsembleGuide, ps.MCDropoutGuide, ps.MAPGuide])
def test_a_noise_scale_is_a_point_too(make_guide):
    net = ps.bayesianize(nn.Linear(3, 1))
    guide = make_guide(ps.Regressor(net, num_data=12, noise_scale=dist.HalfNormal(1.0)))
    guide.initialize(*regression_data())
    values = {guide.draw()["noise_scale"].item() for _ in range(40)}
    assert len(values) == (5 if make_guide is ps.EnsembleGuide else 1)
    assert min(values) > 0


# ---- mixtures of guides --------------------------------------------------------------------------


MAKE = {
    "k-tied": partial(ps.KTiedGuide, rank=2),
    "matrix normal, joined": partial(ps.MatrixNormalGuide, join_bias=True),
    "low rank": partial(ps.AutoLowRankLRT, rank=2),
    "inducing weights": partial(ps.InducingWeightGuide, inducing_shape=(2, 2)),
    "shared inducing weights": partial(
        ps.InducingWeightGuide, inducing_shape=(2, 2), inducing_posterior="full", shared=True
    ),
    "global inducing": partial(ps.GlobalInducingGuide, inputs=6),
}


def mixture(make_guide, model=None, size=3, **options):
    model = make_regressor(12) if model is None else model
    guide = ps.MixtureGuide(model, make_guide, size, **options)
    guide.initialize(*regression_data())
    return model, guide


def near(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MAKE)
def test_terms_and_gradients_of_one_pass_are_the_means_of_those_of_members(name):
    """With hardly any noise, since a pass of several members takes it in another order."""
    model, guide = mixture(partial(MAKE[name], init_scale=1e-9))
    data, elbo = regression_data(), ps.StructuredELBO()
    each, gradients = [elbo.terms(model, member, *data) for member in guide.members], []
    for vectorize in (True, False):
        guide.vectorize = vectorize
        terms = elbo.terms(model, guide, *data)
        for part in ("log_likelihood", "kl"):
            for site, found in getattr(terms, part).items():
                expected = torch.stack([getattr(own, part)[site] for own in each]).mean()
                near(found, expected, 1e-5)
        gradients.append(torch.autograd.grad(terms.elbo, [*guide.parameters()]))
    for own, expected in zip(*gradients, strict=True):
        near(own, expected, 1e-4)
    assert len({own.elbo.item() for own in each}) == 3


def test_members_draw_separate_noise():
    _, guide = mixture(partial(ps.MeanFieldGuide, init_scale=0.3))
    for member in guide.members[1:]:
        member.load_state_dict(guide.members[0].state_dict())
    draws = guide.joint_posterior().draw_many([*range(6)])["net.0.weight"]
    assert len({tuple(each.flatten().tolist()) for each in draws}) == 6


def test_a_traced_step_trains_all_members_as_an_eager_one(monkeypatch):
    trace_at_once(monkeypatch.setattr)
    losses, data = [], regression_data()
    for compiled in (False, "traced"):
        pyro.set_rng_seed(3)
        model, guide = mixture(MAKE["k-tied"])
        history = ps.fit(model, guide, data, num_steps=8, compiled=compiled, progress=False)
        losses.append(torch.tensor(history.elbo))
    near(*losses)
    assert not history.compilation


def test_any_number_of_draws_follows_the_weights():
    _, guide = mixture(ps.MAPGuide, size=3)
    guide.weights.copy_(torch.tensor([0.6, 0.3, 0.1]))
    values = [guide.draw(number=number)["net.0.weight"] for number in range(50)]
    own = [member.draw()["net.0.weight"] for member in guide.members]
    chosen = torch.tensor([[torch.equal(value, each) for each in own] for value in values])
    counts = chosen.double().cumsum(0)
    expected = torch.arange(1.0, 51.0).unsqueeze(-1) * guide.weights
    assert (counts - expected).abs().max() < 1
    assert chosen.sum(-1).eq(1).all()


def test_a_prediction_is_the_weighted_mixture():
    model, guide = mixture(ps.MAPGuide, size=2)
    x, y = regression_data()
    guide.weights.copy_(torch.tensor([0.75, 0.25]))
    each = [
        ps.predict(model, member, x, y=y, num_samples=1).log_density for member in guide.members
    ]
    expected = (torch.stack(each) + guide.weights.log().unsqueeze(-1)).logsumexp(0)
    for number in (4, None):
        near(ps.predict(model, guide, x, y=y, num_samples=number).log_density, expected)


def test_weights_by_the_bound():
    """Here the bound is a log joint density, up to the entropy that all members share."""
    model, guide = mixture(partial(ps.MeanFieldGuide, init_scale=1e-6))
    data = regression_data()
    bounds = [ps.StructuredELBO().terms(model, each, *data).elbo for each in guide.members]
    ps.weigh_by_bound(model, guide, *data)
    near(guide.weights, torch.stack(bounds).detach().softmax(0), 1e-4)
    assert guide.best is guide.members[int(guide.weights.argmax())]


def test_weights_by_the_bound_are_those_of_evaluation_mode():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=False), 12, 0.5)
    guide = ps.MixtureGuide(model, partial(ps.MeanFieldGuide, init_scale=1e-6), 2, vectorize=False)
    data = regression_data()
    before = {name: value.clone() for name, value in model.named_buffers()}
    ps.weigh_by_bound(model, guide, *data)
    assert model.training
    for name, value in model.named_buffers():
        near(value, before[name])
    model.eval()
    bounds = [ps.StructuredELBO().terms(model, each, *data).elbo for each in guide.members]
    near(guide.weights, torch.stack(bounds).detach().softmax(0), 1e-4)


def test_stacking_finds_the_optimal_weights():
    model, guide = mixture(ps.MAPGuide, size=2)
    with torch.no_grad():
        guide.members[1]["net.2.weight"].loc.mul_(-5.0)
    x, _ = regression_data()
    a, b = (ps.predict(model, each, x, num_samples=1).mean for each in guide.members)
    which = (torch.arange(len(x)) % 3 == 0).unsqueeze(-1)
    y = torch.where(which, a, b)
    ps.weigh_by_stacking(model, guide, x, y)
    p = [ps.predict(model, each, x, y=y, num_samples=1).log_density.exp() for each in guide.members]
    grid = torch.linspace(0, 1, 20001)
    total = (grid.unsqueeze(-1) * p[0] + (1 - grid.unsqueeze(-1)) * p[1]).log().sum(-1)
    best = grid[total.argmax()]
    assert 0.05 < best < 0.95
    near(guide.weights[0], best, 1e-4)
    whole = guide.weights.clone()
    ps.weigh_by_stacking(model, guide, x, y, batch_size=5)
    near(guide.weights, whole)
    with pytest.raises(ValueError, match="no finite density under any member of `guide`"):
        ps.weigh_by_stacking(model, guide, x, y + 1e200)
    near(guide.weights, whole)


@pytest.mark.parametrize("weights", [(2.0, 1.0), (0.5, 0.4), (1.5, -0.5), (math.nan, 1.0)])
def test_weights_are_probabilities(weights):
    _, guide = mixture(ps.MeanFieldGuide, size=2)
    guide.weights.copy_(torch.tensor(weights))
    for use in (guide.draw, guide.median, lambda: guide(*regression_data())):
        with pytest.raises(ValueError, match=r"`guide.weights` must be at least 0 and sum to 1"):
            use()
    guide.float().weights.copy_(torch.tensor([0.3, 0.7]))
    assert guide.draw().keys() == guide.median().keys()


def test_members_start_at_given_medians_and_weights_are_saved():
    model, ensemble = mixture(ps.MAPGuide)
    _, guide = mixture(ps.MatrixNormalGuide, model, starts=ensemble)
    for member, start in zip(guide.members, ensemble.members, strict=True):
        for name, value in start.median().items():
            near(member.median()[name], value)
    guide.weights.copy_(torch.tensor([0.5, 0.3, 0.2]))
    _, other = mixture(ps.MatrixNormalGuide, model)
    other.load_state_dict(guide.state_dict())
    near(other.weights, guide.weights)
    near(other.median()["net.0.weight"], guide.median()["net.0.weight"])


def test_scalars_and_constrained_sites_start_apart_in_their_support():
    def model(x):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(shares[0], scale), obs=x)

    guide = ps.EnsembleGuide(model, 4)
    guide.initialize(torch.ones(5))
    medians = [each.median() for each in guide.members]
    assert len({float(each["scale"]) for each in medians}) == 4
    assert all(each["scale"] > 0 for each in medians)
    near(torch.stack([each["shares"].sum() for each in medians]), torch.ones(4))


def test_what_is_refused():
    for make_guide in (lambda model: nn.Linear(1, 1), partial(ps.EnsembleGuide, size=2)):
        with pytest.raises(TypeError, match="`make_guide` must be a function from the model"):
            mixture(make_guide)
    model, ensemble = mixture(ps.MAPGuide)
    with pytest.raises(ValueError, match="`starts` must be a mixture of 2 guides"):
        mixture(ps.MeanFieldGuide, model, 2, starts=ensemble)
    with pytest.raises(TypeError, match=r"`starts` must be a fitted mixture.*but got a MAPGuide"):
        mixture(ps.MeanFieldGuide, model, 1, starts=ps.MAPGuide(model))
    with pytest.raises(ValueError, match="weigh_by_stacking"):
        ps.weigh_by_bound(model, ensemble, *regression_data())
    guide = ps.MixtureGuide(linear_function, ps.MeanFieldGuide, 2)
    assert not guide.is_of_points  # without sites yet
    ps.weigh_by_bound(linear_function, guide, torch.randn(12, 3), torch.randn(12, 2))
    assert not guide.is_of_points


def other_kinds(*makers):
    """A function from a model to guides of one kind after another."""
    following = iter(makers)
    return lambda model: next(following)(model)


UNLIKE = {
    "bounds of scales": [
        partial(ps.StructuredGuide, families={"*": MeanField(most)}, init_scale=1.0)
        for most in (0.1, 10.0)
    ],
    "rates of dropout": [partial(ps.MCDropoutGuide, rate=rate) for rate in (0.0, 0.5)],
    "families": [ps.MeanFieldGuide, ps.KTiedGuide],
    "couplings": [
        ps.MAPGuide,
        partial(ps.StructuredGuide, families={"*": Subnetwork(posterior=MeanField())}),
    ],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_members_of_several_kinds_run_one_after_another(name):
    model, guide = mixture(other_kinds(*UNLIKE[name]), size=2, vectorize=False)
    data, elbo = regression_data(), ps.StructuredELBO()
    torch.manual_seed(1)
    found = elbo.terms(model, guide, *data).elbo
    torch.manual_seed(1)
    near(found, sum(elbo.terms(model, member, *data).elbo for member in guide.members) / 2)
    draws = guide.joint_posterior().draw_many(range(400))
    for number, member in enumerate(guide.members):
        alone = member.joint_posterior().draw_many(range(200))
        for site, values in draws.items():
            own = values[number::2].std(0).mean()
            torch.testing.assert_close(own, alone[site].std(0).mean(), rtol=0.2, atol=1e-9)


def test_members_of_several_kinds_do_not_run_in_one_pass():
    model, guide = mixture(other_kinds(*UNLIKE["bounds of scales"]), size=2)
    with pytest.raises(ValueError, match="vectorize=False"):
        ps.StructuredELBO().loss(model, guide, *regression_data())
    model, guide = mixture(ps.MeanFieldGuide, size=2)
    ps.pruning.prune_mean_field(guide.members[1], 0.5)
    zeros = [
        (draw == 0).any() for draw in guide.joint_posterior().draw_many(range(4))["net.0.weight"]
    ]
    assert zeros == [False, True, False, True]
