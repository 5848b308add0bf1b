"""Random parameters of a pass: what a net reads of itself, keeps, and is called."""

import abc
import copy
import pickle
from contextlib import nullcontext

import pyro.poutine as poutine
import pytest
import torch
from torch import nn
from torch.func import functional_call

import pyro_structvi as ps
from tests.models import regression_data


class ReadsItself(nn.Module):
    """Multiplies its output by the squared norm of all of its parameters, a frozen one included."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.base = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        assert [name for name, _ in self.named_parameters()] == [*self.state_of_names]
        norm = sum(parameter.square().sum() for parameter in self.parameters())
        return self.last(self.base(torch.tanh(self.first(x)))) * norm

    state_of_names = ("first.weight", "first.bias", "base.weight", "last.weight", "last.bias")


class AsksForADevice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x.to(next(self.parameters()).device))


class TakesSlices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.shifts = nn.ParameterList([torch.ones(4), torch.ones(1)])

    def forward(self, x):
        first, last = self.shifts[:]
        return self.layers[-1](self.layers[:-1](x) + first) + last


class Adjoint(torch.autograd.Function):
    """Applies a module, and computes it again for the gradients of parameters that it is given."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            output = ctx.module(x)
        return None, None, *torch.autograd.grad(output, parameters, gradient)


class HandsItsParametersOn(nn.Module):
    """Has its parameters' gradients from what it handed them to, as a neural ODE with an adjoint."""

    def __init__(self, adjoint):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.adjoint = adjoint

    def forward(self, x):
        if self.adjoint:
            return Adjoint.apply(self.field, x, *self.field.parameters())
        return self.field(x)


class InnerStep(nn.Module):
    """Predicts after a step of gradient descent on its own parameters."""

    def __init__(self, functional):
        super().__init__()
        self.inner, self.functional = nn.Linear(3, 1), functional

    def forward(self, x):
        with torch.enable_grad():
            outputs = self.inner(x)
            own = dict(self.inner.named_parameters())
            gradients = torch.autograd.grad(outputs.square().sum(), own.values(), create_graph=True)
            moved = {name: own[name] - 0.1 * g for name, g in zip(own, gradients, strict=True)}
        if self.functional:
            return functional_call(self.inner, moved, (x,))
        return nn.functional.linear(x, moved["weight"], moved["bias"])


def model_of(net, **options):
    model = ps.Regressor(ps.bayesianize(net), 12, 0.3)
    return model, ps.MeanFieldGuide(model, init_scale=0.3, **options)


@pytest.mark.parametrize(
    "make",
    [ReadsItself, lambda: InnerStep(False), lambda: InnerStep(True), AsksForADevice, TakesSlices],
)
def test_a_net_that_reads_its_parameters_is_the_net_at_the_draw(make):
    model, guide = model_of(make())
    x, y = regression_data()
    ps.fit(model, guide, (x, y), num_steps=3, progress=False)
    with guide.sampled() as draw:
        torch.testing.assert_close(model(x), guide.to_net(draw)(x), rtol=1e-12, atol=1e-12)
    draws = {name: torch.stack([value, value]) for name, value in guide.draw().items()}
    expected = guide.to_net({name: value[0] for name, value in draws.items()})(x).detach()
    torch.testing.assert_close(ps.predict(model, draws, x).mean, expected, rtol=1e-12, atol=0)
    draws_outputs = all(use.allows_outputs for use in guide.uses.values())
    assert draws_outputs or make not in (AsksForADevice, TakesSlices)


def test_gradients_of_parameters_that_are_handed_on():
    (x, y), found = regression_data(), []
    for adjoint in (True, False):
        torch.manual_seed(0)
        model, guide = model_of(HandsItsParametersOn(adjoint), local_reparam=adjoint)
        guide.initialize(x, y)
        torch.manual_seed(1)
        ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
        found.append([parameter.grad for parameter in guide.parameters()])
    assert all(gradient.abs().sum() > 0 for gradient in found[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


class Caches(nn.Module):
    """Keeps functions of its weights in evaluation mode, and an auxiliary output in any mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("cached_buffer", None, persistent=False)
        self.cache, self.scale, self.length, self.penalty = {}, None, 0, torch.zeros(())

    def train(self, mode=True):
        self.cache, self.scale, self.length, self.cached_buffer = {}, None, 0, None
        return super().train(mode)

    def forward(self, x):
        weight = self.layer.weight
        self.penalty = weight.square().sum()
        if self.training:
            return self.layer(x) * weight.sum() + weight.mean() - weight.norm()
        if x.device.type not in self.cache:
            self.cache[x.device.type] = weight.sum()
        if self.length < 1:
            self.scale, self.length = weight.mean(), 1
        if self.cached_buffer is None:
            self.cached_buffer = weight.norm()
        return self.layer(x) * self.cache[x.device.type] + self.scale - self.cached_buffer


def test_caches_in_evaluation_mode_belong_to_one_draw():
    model, guide = model_of(Caches())
    x, y = regression_data()
    draws = {name: torch.stack([v, v + 1, v - 2]) for name, v in guide.draw().items()}
    nets = [guide.to_net({name: v[k] for name, v in draws.items()}).eval() for k in range(3)]
    expected = torch.stack([net(x) for net in nets]).mean(0).detach()
    for max_memory in (1.0, 1e-9):  # draws together, and one after another
        found = ps.predict(model, draws, x, max_memory=max_memory).mean
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    model.eval()
    for k in (0, 1):
        given = poutine.condition(model, {name: v[k] for name, v in draws.items()})
        torch.testing.assert_close(given(x), nets[k](x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.net.penalty, nets[k].penalty)  # readable after the pass
    with guide.sampled() as draw:
        model(x)
        kept = model.net.cache["cpu"]
        model(x)
        assert model.net.cache["cpu"] is kept
    assert kept == draw["net.layer.weight"].sum()
    assert copy.deepcopy(model).net.cache == {}
    assert model.net.cache == {}
    guide.initialize(x, y)


def test_a_pass_that_fails_leaves_no_cache():
    model, guide = model_of(Caches())
    model.eval()
    with guide.sampled(), pytest.raises(ValueError, match="`x`"):
        poutine.block(model)(torch.zeros(0, 3))
    x = torch.randn(2, 3)
    with guide.sampled() as draw:
        assert torch.equal(model(x), guide.to_net(draw).eval()(x))


class WithMeta(nn.Linear, abc.ABC):
    """A class with another metaclass."""


@pytest.mark.parametrize("kind", [ReadsItself, WithMeta])
def test_a_bayesian_net_is_looked_up_as_its_class(kind):
    net = ps.bayesianize(kind() if kind is ReadsItself else kind(3, 1))
    assert str(type(net)) == str(kind)
    assert isinstance(net, kind)
    assert type(net) is type(copy.deepcopy(net))


@pytest.mark.parametrize(
    ("make_net", "make"),
    [
        (lambda: nn.utils.weight_norm(nn.Linear(3, 1)), copy.deepcopy),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)), copy.deepcopy),
        (
            lambda: nn.Sequential(nn.Flatten(), WithMeta(3, 1)),
            lambda net: pickle.loads(pickle.dumps(net)),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_copies_after_a_pass(make_net, make):
    model, guide = model_of(make_net())
    x, y = regression_data()
    ps.fit(model, guide, (x, y), num_steps=2, progress=False)
    other = make(model)
    draw = guide.draw()
    given = [poutine.condition(each, draw)(x) for each in (model, other)]
    assert torch.equal(*given)
    other.net.load_state_dict(model.net.state_dict())


def test_each_draw_has_its_own_weight_where_torch_caches_parametrizations():
    model, guide = model_of(nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)))
    x, y = regression_data()
    guide.initialize(x, y)
    found = []
    for caches in (nullcontext, nn.utils.parametrize.cached):
        torch.manual_seed(0)
        with caches():
            drawn = ps.predict(model, guide, x, num_samples=3).functions
            found.append((drawn, ps.StructuredELBO(num_particles=3).loss(model, guide, x, y)))
    torch.testing.assert_close(*found)


class CountsCalls(nn.Linear):
    """Keeps a number, and no tensor, in evaluation mode."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_numbers_without_tensors_are_kept():
    model, guide = model_of(CountsCalls(3, 1))
    model.eval()
    for number in (1, 2):
        with guide.sampled():
            model(torch.randn(2, 3))
        assert model.net.calls == number
