"""Properties that hold for every net and guide, on random small architectures."""

import copy
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import pyro_structvi as ps
from tests.guide_cases import GUIDES

SIZE = 6
FAST, SLOW = 30, 2000
# "inducing weights, full" takes seconds to trace.
NAMES = sorted(set(GUIDES) - {"inducing weights, full, not joined"})


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


@st.composite
def parts_of_vectors(draw, width, most):
    """Layers from a width to a drawn one, which is returned with them."""
    parts = []
    for kind in draw(st.lists(st.sampled_from(["linear", "norm", "residual"]), max_size=most)):
        if kind == "linear":
            out = draw(st.integers(1, 5))
            parts += [nn.Linear(width, out, bias=draw(st.booleans())), nn.Tanh()]
            width = out
        elif kind == "norm" and width > 1:
            parts.append(nn.LayerNorm(width))
        elif kind == "residual":
            parts.append(Residual(width))
    return parts, width


@st.composite
def nets(draw):
    """A net from vectors or images to outputs, with a batch of its inputs."""
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    outputs = draw(st.integers(1, 3))
    if draw(st.booleans()):
        width = draw(st.integers(1, 4))
        x, parts = torch.randn(SIZE, width), []
    else:
        channels, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
        kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        x = torch.randn(SIZE, channels, 4, 4)
        conv = nn.Conv2d(
            channels, 2, kernel, stride, padding=draw(st.integers(0, 1)), groups=groups
        )
        parts = [conv, nn.ReLU(), nn.AdaptiveAvgPool2d(draw(st.integers(1, 2))), nn.Flatten()]
        width = nn.Sequential(*parts)(x).shape[1]
    hidden, width = draw(parts_of_vectors(width, most=3))
    return nn.Sequential(*parts, *hidden, nn.Linear(width, outputs)), x, seed


@st.composite
def cases(draw):
    """A likelihood of a random net, the name of a guide, and data."""
    net, x, seed = draw(nets())
    outputs = net(x).shape[1]
    prior = draw(st.sampled_from([0.5, ps.FanIn(1.5)]))
    net = ps.bayesianize(net, prior=prior, normalization=draw(st.booleans()))
    if draw(st.booleans()):
        model, y = ps.Classifier(net, SIZE), torch.randint(outputs, (SIZE,))
    else:
        model, y = ps.Regressor(net, SIZE, 0.5), torch.randn(SIZE, outputs)
    return model, draw(st.sampled_from(NAMES)), x, y, seed


def on_random_nets(test):
    """Run a property on few nets, and on many in the slow suite; failures print the case."""
    marks = {FAST: (), SLOW: pytest.mark.slow}

    @pytest.mark.parametrize("count", [pytest.param(n, marks=m) for n, m in marks.items()])
    def run(count):
        checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
        options = {"derandomize": True, "deadline": None, "database": None}
        settings(max_examples=count, suppress_health_check=checks, **options)(
            given(cases())(test)
        )()

    return run


def make_guide(model, name, x, y, **options):
    guide = GUIDES[name](model, init_scale=0.2, **options)
    guide.initialize(x, y)
    with torch.no_grad():
        for value in guide.parameters():  # away from the start
            value += 0.1 * torch.randn_like(value)
    return guide


def make_draws(case, count):
    """Return the model, a guide, and draws of it by site."""
    model, name, x, y, seed = case
    guide = make_guide(model, name, x, y)
    torch.manual_seed(seed)
    return model, guide, guide.joint_posterior().draw_many(range(count))


def bounds(model, guide, x, y, seed):
    """Return the mean of the log likelihood's estimates, their standard error, and the KL."""
    torch.manual_seed(seed)
    elbo = ps.StructuredELBO(num_particles=150, vectorize_particles=True)
    terms = [elbo.terms(model, guide, x, y) for _ in range(6)]
    values = torch.stack([sum(each.log_likelihood.values()) for each in terms]).detach()
    kl = sum(terms[0].kl.values()).detach()
    return values.mean(), values.std() / math.sqrt(len(values)), kl


@on_random_nets
def test_sampled_outputs_and_sampled_weights_have_one_bound(case):
    """A false alarm has a probability of 1e-7 for each net: Student's t with 10 degrees, at 14."""
    model, name, x, y, seed = case
    guide = make_guide(model, name, x, y, local_reparam="exact")
    drawn = make_guide(model, name, x, y, local_reparam=False)
    drawn.load_state_dict(guide.state_dict())
    (local, error, kl), (weights, other, other_kl) = (
        bounds(model, each, x, y, seed) for each in (guide, drawn)
    )
    torch.testing.assert_close(kl, other_kl, rtol=1e-9, atol=1e-9)
    assert (local - weights).abs() < 14 * torch.hypot(error, other) + 1e-9


@on_random_nets
def test_draws_in_one_pass_are_those_one_by_one(case):
    (model, guide, draws), (*_, x, y, _) = make_draws(case, 5), case
    together = ps.predict(model, draws, x, y=y)
    alone = [ps.predict(model, {k: v[i : i + 1] for k, v in draws.items()}, x) for i in range(5)]
    functions = torch.cat([each.functions for each in alone])
    torch.testing.assert_close(together.functions, functions, rtol=1e-9, atol=1e-10)
    first = {key: value[0] for key, value in draws.items()}
    torch.testing.assert_close(guide.to_net(first).eval()(x), functions[0], rtol=1e-9, atol=1e-10)


@on_random_nets
def test_a_loaded_posterior_predicts_as_the_saved_one(case):
    model, name, x, y, seed = case
    guide = make_guide(model, name, x, y)
    with tempfile.TemporaryDirectory() as folder:
        ps.save(Path(folder) / "file", model, guide)
        loaded = ps.load(Path(folder) / "file", model)
    found = []
    for each in (guide, loaded):
        torch.manual_seed(seed)
        found.append(ps.predict(model, each, x, num_samples=3).functions)
    assert torch.equal(*found)


@on_random_nets
def test_single_precision_is_double_precision_to_its_rounding(case):
    """Within 1e-4 of the largest function value, for nets of at most six layers."""
    (model, _, draws), (*_, x, _, _) = make_draws(case, 3), case
    double = ps.predict(model, draws, x).functions
    single = {key: value.float() for key, value in draws.items()}
    found = ps.predict(copy.deepcopy(model).float(), single, x.float()).functions
    assert found.dtype == torch.float32
    assert (found - double).abs().max() <= 1e-4 * double.abs().max().clamp_min(1.0)
