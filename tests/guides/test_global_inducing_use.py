"""GlobalInducingGuide as a guide among others: steps, draws, saving, functions, and what it refuses."""

import copy
import math
import pickle

import pyro
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import InducingWeights, MeanField, Members
from tests.guides.layered import NOISE, dense_regression, make_model, scramble
from tests.infer.compiled_steps import assert_same
from tests.models import local_latent_function


def test_points_are_trained_if_asked_and_get_a_gradient():
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    guide = ps.GlobalInducingGuide(make_model(3, 4, 1), x[:5], train_inputs=True)
    ps.StructuredELBO().differentiable_loss(make_model(3, 4, 1), guide, x, y).backward()
    assert guide.inducing_inputs.grad.abs().min() > 0
    every = {name for name, value in guide.named_parameters() if value.grad is not None}
    assert every == {name for name, _ in guide.named_parameters()}


def test_steps_and_draws_together_are_those_one_by_one():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    model = make_model(2, 3, 1)
    guide = ps.GlobalInducingGuide(model, x[:6])
    scramble(guide)
    with torch.no_grad():
        guide["net.0.weight"].row_log_diagonal.add_(3)  # so that hidden units differ between draws
    draws = guide.joint_posterior().draw_many(range(3))
    for number in range(3):
        own = {name: value[number] for name, value in draws.items()}
        hidden = F.linear(x[:6], own["net.0.weight"], own["net.0.bias"]).tanh()
        last = guide["net.2.weight"]
        mean, covariance = dense_regression(
            F.pad(hidden, (0, 1), value=1.0),
            *(last.target, last.log_precision.exp(), last.log_scale.exp()),
        )
        value = torch.cat([own["net.2.weight"], own["net.2.bias"].unsqueeze(-1)], -1)
        whitened = torch.linalg.solve(torch.linalg.cholesky(covariance), (value - mean.mT).mT)
        assert whitened.norm() < 7  # of 4 standard normals; of other hidden units it is far more
    prediction = ps.predict(model, guide, x, num_samples=4)
    assert prediction.functions.shape == (4, 20, 1)
    loss = ps.StructuredELBO(num_particles=3, vectorize_particles=True)
    assert loss.differentiable_loss(model, guide, x, y).isfinite()


def test_compiled_steps_are_the_ordinary_ones():
    data = torch.randn(20, 2), torch.randn(20, 1)

    def make():
        model = make_model(2, 3, 1)
        return model, ps.GlobalInducingGuide(model, data[0][:6], train_inputs=True)

    assert_same(make, data)


def test_running_statistics_are_those_of_the_data_alone():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=True), 20, NOISE)
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    guide = ps.GlobalInducingGuide(model, 100 + x[:6])
    ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
    assert model.net[1].running_mean.abs().max() < 10
    model.eval()
    before = model.net[1].running_mean.clone()
    guide(x, y)
    torch.testing.assert_close(model.net[1].running_mean, before, rtol=0, atol=0)


def test_it_is_saved_loaded_and_copied():
    x, model = torch.randn(6, 2), make_model(2, 3, 1)
    guide = ps.GlobalInducingGuide(model, x)
    scramble(guide)
    other = ps.GlobalInducingGuide(model, torch.zeros(6, 2))
    other.load_state_dict(guide.state_dict())
    for each in (other, copy.deepcopy(guide)):
        torch.manual_seed(5)
        drawn = each.draw()
        torch.manual_seed(5)
        torch.testing.assert_close(drawn, guide.draw(), rtol=0, atol=0)
    lone = pickle.loads(pickle.dumps(guide))
    with pytest.raises(RuntimeError, match="unpickled without its model"):
        lone.draw()
    with pytest.raises(RuntimeError, match="size mismatch"):
        ps.GlobalInducingGuide(model, x[:5]).load_state_dict(guide.state_dict())


def assert_finite_gradients(guide):
    for name, parameter in guide.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_parameters_are_of_full_precision_under_autocast():
    x, y = torch.randn(20, 2).float(), torch.randn(20, 1).float()
    net = ps.bayesianize(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).float(), 1.0)
    model = ps.Regressor(net, 20, NOISE)
    guide = ps.GlobalInducingGuide(model, 5)
    with torch.autocast("cpu", torch.bfloat16):
        ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
    assert {parameter.dtype for parameter in guide.parameters()} == {torch.float32}
    assert_finite_gradients(guide)


def test_attention_and_skips_have_a_gradient_for_every_parameter():
    attention = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, dropout=0.0)
    net = nn.Sequential(attention, nn.Flatten(), nn.Linear(12, 3))
    model = ps.Classifier(ps.bayesianize(net, 1.0, normalization=False), num_data=6)
    x, y = torch.randn(6, 3, 4), torch.randint(3, (6,))
    guide = ps.GlobalInducingGuide(model, x[:2])
    scramble(guide)
    ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
    assert len(guide["net.2.weight"].target) == 2
    assert len(guide["net.0.linear1.weight"].target) == 6  # of 3 positions each
    assert_finite_gradients(guide)


def test_a_function_has_its_points_at_the_first_call():
    x, y = torch.randn(20, 2), torch.randn(20, 1)

    def model(x, y=None):
        first = pyro.sample("a", pyro.distributions.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        second = pyro.sample("b", pyro.distributions.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        scale = pyro.sample("scale", pyro.distributions.LogNormal(0.0, 1.0))
        mean = F.linear(F.linear(x, first).tanh(), second).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", pyro.distributions.Normal(mean, scale), obs=y)

    guide = ps.GlobalInducingGuide(model, x[:4])
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO())
    assert math.isfinite(svi.step(x, y.squeeze(-1)))
    assert guide["b"].target.shape == (4, 1)
    assert guide.draw()["scale"] > 0


def test_weights_that_are_used_otherwise_are_named_at_once():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Conv1d(2, 2, 1, groups=2))
    first = nn.Sequential(net, nn.Flatten(), nn.Linear(8, 1))
    model = ps.Regressor(ps.bayesianize(first, prior=1.0), 20, NOISE)
    sites, words = "'net.0.0.weight', 'net.0.1.weight'", torch.randint(5, (6, 2))
    message = rf"sites \[{sites}\].*in another way.*`families=.*'net.0.1.weight': Mean"
    with pytest.raises(RuntimeError, match=message):
        ps.GlobalInducingGuide(model, words)
    families = {"net.0.*": MeanField()}
    guide = ps.GlobalInducingGuide(model, words, families=families, train_inputs=True)
    assert guide["net.2.weight"].target.shape == (6, 1)
    assert not isinstance(guide.inducing_inputs, nn.Parameter)  # words are no real numbers
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten())
    model = ps.Regressor(ps.bayesianize(net, prior=1.0), 20, NOISE)
    with pytest.raises(RuntimeError, match=r"'net.1.weight' is transposed, stacked or in groups"):
        ps.GlobalInducingGuide(model, torch.randn(3, 2, 1))


def test_what_cannot_stand_beside_the_layers_is_refused():
    model, x = make_model(2, 3, 1), torch.randn(5, 2)
    for options, error, message in (
        ({"families": {"net.0.*": Members(3)}}, ValueError, "are drawn jointly"),
        ({"first_layer": Members(3)}, TypeError, "`first_layer` must be a family of one weight"),
        ({"local_reparam": True}, ValueError, "`local_reparam` must be False"),
    ):
        with pytest.raises(error, match=message):
            ps.GlobalInducingGuide(model, x, **options)
    with pytest.raises(ValueError, match="Pass the inducing points themselves"):
        ps.GlobalInducingGuide(model, 3).initialize(x=x)
    with pytest.raises(ValueError, match=r"but it is a torch.Tensor of shape \(\)"):
        ps.GlobalInducingGuide(lambda scale: model(x), 3).initialize(torch.tensor(1.0))
    guide = ps.GlobalInducingGuide(model, x, first_layer=InducingWeights((2, 2)))
    assert guide.draw()["net.0.weight"].shape == (3, 2)
    with pytest.raises(NotImplementedError, match="depend on each other"):
        guide.quantiles([0.5])
    with pytest.raises(NotImplementedError, match="depends on its points"):
        ps.estimate_memory(ps.GlobalInducingGuide, model)
    q = guide["net.2.weight"]()
    for ask in (lambda: q.variance, lambda: q.mean, q.rsample, lambda: q.log_prob(x)):
        with pytest.raises(NotImplementedError, match=r"Use `guide.draw\(\)`"):
            ask()


def test_a_part_of_a_list_of_guides_and_sites_of_single_examples_are_refused():
    model = make_model(2, 3, 1)
    together = pyro.infer.autoguide.AutoGuideList(model)
    together.append(ps.GlobalInducingGuide(poutine.block(model, hide=["net.2.bias"])))
    with pytest.raises(NotImplementedError, match="cannot be a part of an AutoGuideList"):
        together(torch.randn(20, 2), torch.randn(20, 1))
    guide = ps.GlobalInducingGuide(local_latent_function, 3)
    with pytest.raises(ValueError, match="belong to single examples"):
        guide.initialize(torch.randn(5, 3), torch.randn(5))
