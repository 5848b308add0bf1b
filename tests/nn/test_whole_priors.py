"""Priors over all elements of a parameter together, such as the posterior of earlier data."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence

import pyro_structvi as ps
from pyro_structvi.infer import SampledKLWarning
from tests.distributions.cases import (
    CASES,
    make_full,
    make_k_tied,
    make_log_scale,
    make_matrix_normal,
)
from tests.guide_cases import GUIDES
from tests.models import regression_data

SHAPE = (5, 3)
PRIORS = {
    "2-tied": lambda: make_k_tied(2)((), SHAPE, torch.float64),
    "matrix normal": lambda: make_matrix_normal((), SHAPE, torch.float64),
    "full": lambda: make_full((), SHAPE, torch.float64),
    "log scale": lambda: make_log_scale((), SHAPE, torch.float64),
    "multivariate": lambda: dist.TransformedDistribution(
        dist.MultivariateNormal(torch.zeros(15), torch.eye(15).double() + 0.2),
        [dist.transforms.ReshapeTransform((15,), SHAPE)],
    ),
    "rows": lambda: dist.MultivariateNormal(torch.zeros(SHAPE), torch.eye(3) + 0.2).to_event(1),
}


def make_model(prior):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net = ps.bayesianize(net, {"0.weight": prior, "*": 1.0})
    return ps.Regressor(net, 12, 0.3)


@pytest.mark.parametrize("name", PRIORS)
def test_the_site_has_the_prior(name):
    prior, data = PRIORS[name](), regression_data()
    model = make_model(prior)
    draw = prior.sample()
    nodes = pyro.poutine.trace(pyro.poutine.condition(model, {"net.0.weight": draw})).get_trace(
        data[0]
    )
    found = nodes.nodes["net.0.weight"]["fn"]
    torch.testing.assert_close(found.log_prob(draw), prior.log_prob(draw))
    guide = ps.MatrixNormalGuide(model, join_bias=False)
    for options in ({}, {"num_particles": 2, "vectorize_particles": True}):
        terms = ps.StructuredELBO(**options).terms(model, guide, *data)
        assert not terms.sampled
        expected = kl_divergence(guide["net.0.weight"](), prior)
        torch.testing.assert_close(terms.kl["net.0.weight"], expected)
    start = ps.MAPGuide(model).median()["net.0.weight"]
    assert torch.equal(start, model.net.get_submodule("0").initial_values["weight"])


@pytest.mark.parametrize("name", ["matrix normal", pytest.param("rows", marks=pytest.mark.slow)])
def test_the_kl_of_a_joined_weight_is_estimated_by_draws(name):
    prior, data = PRIORS[name](), regression_data()
    model = make_model(prior)
    apart, joined = (
        ps.MatrixNormalGuide(model, join_bias=join_bias) for join_bias in (False, True)
    )
    with torch.no_grad():
        for guide in (apart, joined):
            for posterior in guide.all_posteriors():
                nn.init.zeros_(posterior.loc)
    expected = sum(ps.StructuredELBO().terms(model, apart, *data).kl.values())
    with pytest.warns(SampledKLWarning, match="net.0.weight\\+bias"):
        found = [ps.StructuredELBO().terms(model, joined, *data) for _ in range(400)]
    nats = torch.stack([sum(terms.kl.values()) for terms in found]).detach()
    assert abs(nats.mean() - expected) < 5 * nats.std() / len(nats) ** 0.5


@pytest.mark.parametrize("name", ["2-tied", "multivariate", "rows"])
def test_it_moves_converts_and_is_copied_with_the_model(name):
    prior = PRIORS[name]()
    model = make_model(prior)
    draw = prior.sample()

    def density(model, dtype=torch.float64):
        module = model.net.get_submodule("0")
        with pyro.poutine.trace() as trace:
            model(torch.zeros(2, 3, dtype=dtype))
        own = trace.trace.nodes["net.0.weight"]["fn"]
        assert module.weight.dtype == dtype
        return own.log_prob(draw.to(dtype)).double()

    expected = prior.log_prob(draw)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(density(other), expected)
    fresh = make_model(PRIORS[name]())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(density(fresh), expected)
    single = density(copy.deepcopy(model).float(), torch.float32)
    torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guide_name", ["k-tied", "rowwise"])
def test_yesterdays_posterior_is_todays_prior(guide_name):
    data = regression_data()
    yesterday = GUIDES[guide_name](make_model(1.0))
    found = {name: yesterday[name]() for name in yesterday.site_names}
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net = ps.bayesianize(net, lambda name, _: found[f"net.{name}"])
    model = ps.Regressor(net, 12, 0.3)
    today = GUIDES[guide_name](model)
    terms = ps.StructuredELBO().terms(model, today, *data)
    assert not terms.sampled
    terms.elbo.backward()
    assert all(value.grad is None for value in yesterday.parameters())
    for name, q in found.items():
        torch.testing.assert_close(terms.kl[name], kl_divergence(today[name](), q))
        assert terms.kl[name] > 0
    today.load_state_dict(yesterday.state_dict())
    for nats in ps.StructuredELBO().terms(model, today, *data).kl.values():
        torch.testing.assert_close(nats, torch.zeros(()), rtol=0, atol=1e-9)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"'0.weight' must be over single elements, or .*\(5, 3\)"):
        make_model(make_k_tied(2)((), (3, 5), torch.float64))
    with pytest.raises(ValueError, match=r"got batch shape \(5,\) and event shape \(3,\)"):
        make_model(dist.MultivariateNormal(torch.zeros(SHAPE), torch.eye(3)))
    inducing = next(case for case in CASES if case.kl_with_inducing is not None)
    with pytest.raises(TypeError, match="must be a distribution that its own tensors define"):
        make_model(inducing.make((), SHAPE, torch.float64))
