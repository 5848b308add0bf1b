"""Guides of points: maximum a posteriori, ensembles, dropout."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import MeanField, Members
from tests.guides.matrix_guides import minimize
from tests.models import (
    hierarchical_function,
    linear_function,
    make_classifier,
    make_regressor,
    regression_data,
)
from tests.statistics import assert_mean
from tests.unit_noise import close

NUM_DATA, PRIOR, NOISE = 12, 0.7, 0.3


def map_loss(values, x, y, num_data=NUM_DATA):
    """Return minus the log joint density of the regressor's net, written out."""
    hidden = torch.tanh(F.linear(x, values["net.0.weight"], values["net.0.bias"]))
    mean = F.linear(hidden, values["net.2.weight"], values["net.2.bias"])
    log_likelihood = dist.Normal(mean, NOISE).log_prob(y).sum() * num_data / len(x)
    log_prior = sum(dist.Normal(0.0, PRIOR).log_prob(value).sum() for value in values.values())
    return -log_likelihood - log_prior


def member(guide, number):
    return guide.members[number].draw()


# ---- maximum a posteriori ------------------------------------------------------------------------


def test_the_loss_is_that_of_maximum_a_posteriori_under_every_objective():
    model, data = make_regressor(NUM_DATA, PRIOR, NOISE), regression_data(6)
    guide = ps.MAPGuide(model)
    expected = map_loss(guide.draw(), *data)
    for elbo in (ps.StructuredELBO(), Trace_ELBO(), TraceMeanField_ELBO()):
        close(torch.tensor(elbo.loss(model, guide, *data)), expected.detach())
    # A hierarchical scale has no closed form with any other posterior, and would be warned of.
    for guide in (ps.MAPGuide(hierarchical_function), ps.EnsembleGuide(hierarchical_function, 2)):
        assert ps.StructuredELBO().terms(hierarchical_function, guide, *data).sampled == ()


def test_constrained_sites_are_points_of_their_own_space():
    """At the maximum of the density itself, not of that in the unconstrained space."""
    model = lambda: pyro.sample("rate", dist.Gamma(3.0, torch.tensor(2.0)))  # noqa: E731
    guide = ps.MAPGuide(model)
    guide.initialize()
    minimize(guide, lambda: ps.StructuredELBO()(model, guide)())
    torch.testing.assert_close(guide.draw()["rate"].detach(), torch.tensor(1.0), rtol=1e-5, atol=0)


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
    model, data = make_regressor(NUM_DATA, PRIOR, NOISE), regression_data(6)
    guide = ps.EnsembleGuide(model, size=3, vectorize=vectorize)
    loss = ps.StructuredELBO().differentiable_loss(model, guide, *data)
    each = torch.stack([map_loss(member(guide, k), *data) for k in range(3)])
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
    logits = []
    for k in range(3):
        values = member(guide, k)
        hidden = torch.relu(F.linear(x, values["net.0.weight"], values["net.0.bias"]))
        logits.append(F.linear(hidden, values["net.2.weight"], values["net.2.bias"]))
    close(prediction.functions, torch.stack(logits).detach())
    close(prediction.mean, torch.stack(logits).softmax(-1).mean(0).detach())
    again = ps.predict(model, guide, x, num_samples=6)
    close(again.functions, prediction.functions.repeat(2, 1, 1))


def test_an_ensemble_stands_beside_other_families():
    model, data = make_regressor(), regression_data()
    families = {"*.weight": Members(3), "*": MeanField()}
    guide = ps.StructuredGuide(model, families, init_scale=1e-6)
    ps.fit(model, guide, data, num_steps=5, lr=0.02, progress=False)
    chosen = []
    for _ in range(40):
        values = guide.draw()
        pair = []
        for name in ("net.0.weight", "net.2.weight"):
            same = (guide[name].members == values[name]).flatten(1).all(-1)
            pair.append(same.nonzero().item())
        chosen.append(pair)
    assert all(first == second for first, second in chosen)
    assert {first for first, _ in chosen} == {0, 1, 2}


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
