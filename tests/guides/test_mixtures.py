"""Mixtures of guides in several basins."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.models import linear_function, make_regressor, regression_data

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


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MAKE)
def test_the_terms_of_one_pass_are_the_means_of_those_of_members(name):
    """With hardly any noise, since a pass of several members takes it in another order."""
    model, guide = mixture(partial(MAKE[name], init_scale=1e-7))
    data, elbo = regression_data(), ps.StructuredELBO()
    each = [elbo.terms(model, member, *data) for member in guide.members]
    for vectorize in (True, False):
        guide.vectorize = vectorize
        terms = elbo.terms(model, guide, *data)
        for part in ("log_likelihood", "kl"):
            for site, found in getattr(terms, part).items():
                expected = torch.stack([getattr(own, part)[site] for own in each]).mean()
                close(found, expected, 1e-5)
    assert len({own.elbo.item() for own in each}) == 3


@pytest.mark.parametrize("name", ["k-tied", "global inducing"])
def test_the_gradients_of_one_pass_are_those_of_members(name):
    model, guide = mixture(partial(MAKE[name], init_scale=1e-7))
    found, data = [], regression_data()
    for vectorize in (True, False):
        guide.vectorize = vectorize
        loss = ps.StructuredELBO().differentiable_loss(model, guide, *data)
        found.append(torch.autograd.grad(loss, [*guide.parameters()]))
    for own, expected in zip(*found, strict=True):
        close(own, expected, 5e-4)


def test_members_draw_separate_noise():
    _, guide = mixture(partial(ps.MeanFieldGuide, init_scale=0.3))
    for member in guide.members[1:]:
        member.load_state_dict(guide.members[0].state_dict())
    draws = guide.joint_posterior().draw_many([*range(6)])["net.0.weight"]
    assert len({tuple(each.flatten().tolist()) for each in draws}) == 6


def test_a_traced_step_trains_all_members_as_an_eager_one():
    losses = []
    data = regression_data()
    for compiled in (False, "traced"):
        pyro.set_rng_seed(3)
        model, guide = mixture(MAKE["k-tied"])
        history = ps.fit(model, guide, data, num_steps=120, compiled=compiled, progress=False)
        losses.append(torch.tensor(history.elbo))
    close(*losses)
    assert "traced" in history.compilation[0]


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
    found = ps.predict(model, guide, x, y=y, num_samples=4).log_density
    close(found, (torch.stack(each) + guide.weights.log().unsqueeze(-1)).logsumexp(0))


def test_weights_by_the_bound():
    """Here the bound is a log joint density, up to the entropy that all members share."""
    model, guide = mixture(partial(ps.MeanFieldGuide, init_scale=1e-6))
    data = regression_data()
    bounds = [ps.StructuredELBO().terms(model, each, *data).elbo for each in guide.members]
    ps.weigh_by_bound(model, guide, *data)
    close(guide.weights, torch.stack(bounds).detach().softmax(0), 1e-4)
    assert guide.best is guide.members[int(guide.weights.argmax())]


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
    close(guide.weights[0], best, 1e-4)


def test_members_start_at_given_medians_and_weights_are_saved():
    model, ensemble = mixture(ps.MAPGuide)
    _, guide = mixture(ps.MatrixNormalGuide, model, starts=ensemble)
    for member, start in zip(guide.members, ensemble.members, strict=True):
        for name, value in start.median().items():
            close(member.median()[name], value)
    guide.weights.copy_(torch.tensor([0.5, 0.3, 0.2]))
    _, other = mixture(ps.MatrixNormalGuide, model)
    other.load_state_dict(guide.state_dict())
    close(other.weights, guide.weights)
    close(other.median()["net.0.weight"], guide.median()["net.0.weight"])


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
    close(torch.stack([each["shares"].sum() for each in medians]), torch.ones(4))


def test_what_is_refused():
    for make_guide in (lambda model: nn.Linear(1, 1), partial(ps.EnsembleGuide, size=2)):
        with pytest.raises(TypeError, match="`make_guide` must be a function from the model"):
            mixture(make_guide)
    model, ensemble = mixture(ps.MAPGuide)
    with pytest.raises(ValueError, match="`starts` must be a mixture of 2 guides"):
        mixture(ps.MeanFieldGuide, model, 2, starts=ensemble)
    with pytest.raises(ValueError, match="weigh_by_stacking"):
        ps.weigh_by_bound(model, ensemble, *regression_data())
    guide = ps.MixtureGuide(linear_function, ps.MeanFieldGuide, 2)
    assert not guide.is_of_points  # without sites yet
    ps.weigh_by_bound(linear_function, guide, torch.randn(12, 3), torch.randn(12, 2))
    assert not guide.is_of_points
