"""Draws that cannot run together, and errors in them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.models import (
    make_regressor,
    regression_data,
)
from tests.posterior.passed_models import (
    ONE_BY_ONE,
    assert_same,
    draws_of,
    normalized,
    regressor_of,
)
from tests.statistics import assert_mean


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        output = self.layer(x)
        return output if self.layer.bias.sum() > 0 else -output


class InNumpy(Branching):
    def forward(self, x):
        return x @ torch.from_numpy(self.layer.weight.numpy()).mT


class InPlace(Branching):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last.copy_(self.layer.bias)
        return self.layer(x) + self.last


class Recurrent(Branching):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 1, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize("net", [Branching, InNumpy, InPlace, Recurrent])
def test_what_cannot_be_vectorized_runs_one_by_one_in_silence(net):
    model, (x, y) = regressor_of(net()), regression_data()
    draws = draws_of(ps.MeanFieldGuide(model, init_scale=0.5), 8)
    found = ps.predict(model, draws, x, y=y, batch_size=5)
    assert_same(found, ps.predict(model, draws, x, y=y, batch_size=5, max_memory=ONE_BY_ONE))
    for index, values in enumerate(zip(*draws.values(), strict=True)):
        own = pyro.poutine.condition(model, dict(zip(draws, values, strict=True)))
        with torch.no_grad():
            torch.testing.assert_close(found.functions[index], own(x))


def test_a_guide_that_cannot_be_vectorized_draws_one_by_one(monkeypatch):
    model, x = make_regressor(), torch.randn(5, 3)
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    joint = guide.joint_posterior()
    draw = joint.draw

    def choosy(local, number):
        values = draw(local, number)
        return values if values["net.0.bias"].sum() > -1e9 else {}

    monkeypatch.setattr(joint, "draw", choosy)
    monkeypatch.setattr(guide, "joint_posterior", lambda: joint)
    functions = ps.predict(model, guide, x, num_samples=6).functions
    assert joint._draws_in_turn
    assert len(functions.flatten().unique()) == functions.numel() == 30


def test_a_draw_that_gives_no_number_is_an_error_wherever_it_comes():
    model, (x, y) = make_regressor(), regression_data()
    draws = draws_of(ps.MeanFieldGuide(model), 6)
    draws["net.0.bias"][4, 1] = torch.nan
    with pytest.raises(ValueError, match="The net's output for `x` must be finite"):
        ps.predict(model, draws, x, y=y)
    with pyro.validation_enabled(False):  # as before: who switches it off gets what there is
        assert ps.predict(model, draws, x).mean.isnan().any()


def uniform_function(x, y=None):
    width = pyro.sample("width", dist.Normal(torch.ones(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Uniform(torch.zeros(len(x)), width), obs=y)


def test_what_a_distribution_does_not_take_is_an_error_wherever_it_comes():
    x, y = torch.zeros(3), torch.full((3,), 0.5)
    assert ps.predict(uniform_function, {"width": torch.tensor([2.0, 1.0, 3.0])}, x, y=y)
    with pytest.raises(ValueError, match="within the support"):
        ps.predict(uniform_function, {"width": torch.tensor([2.0, 0.3, 3.0])}, x, y=y)
    with pytest.raises(ValueError, match="parameter low"):
        ps.predict(uniform_function, {"width": torch.tensor([2.0, 1.0, -1.0])}, x)


@pytest.mark.parametrize("factor", [None, 10])
def test_a_model_that_uses_or_returns_what_it_observes_draws_it(factor):
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            drawn = pyro.sample("y", dist.Poisson((x @ weight).exp()), obs=y)
        return factor * drawn if factor else drawn

    functions = ps.predict(model, {"weight": torch.zeros(400, 3)}, torch.randn(5, 3)).functions
    assert_mean(functions, torch.full((5,), factor or 1.0))
    assert_mean(functions.square(), torch.full((5,), 2.0 * (factor or 1) ** 2))


class Marked(torch.Tensor):
    """As a sharded tensor: of a subclass."""


@pytest.mark.parametrize("where", ["draws", "inputs", "parameters", "guide"])
def test_tensors_of_a_subclass_never_meet_vmap(where, monkeypatch):
    model, (x, _) = normalized(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    posterior: object = draws_of(guide, 6)
    mark = lambda value: value.as_subclass(Marked)  # noqa: E731
    if where == "draws":
        posterior = {name: mark(value) for name, value in posterior.items()}
    elif where == "inputs":
        x = mark(x)
    elif where == "parameters":
        model.net[1].weight = nn.Parameter(mark(model.net[1].weight.detach()))
    else:
        posterior, own = guide, guide["net.0.weight"]
        own.loc = nn.Parameter(mark(own.loc.detach()))
    monkeypatch.setattr(torch.func, "vmap", lambda *args, **options: pytest.fail("vmap was called"))
    assert ps.predict(model, posterior, x, num_samples=6).functions.shape == (6, 12, 1)
