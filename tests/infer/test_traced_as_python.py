"""A traced step that is not the step of Python is not replayed: memories, other noise, roundings."""

import re
from itertools import count
from types import SimpleNamespace

import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi._torch import is_recording
from pyro_structvi.infer import CompileFallbackWarning
from pyro_structvi.infer.steps import compiled as steps
from tests.infer.compiled_steps import adam
from tests.infer.test_engines import FOREVER, trace_at_once
from tests.models import regression_data


@pytest.fixture
def traced_fit(monkeypatch):
    """Let fit trace after two eager steps, whatever that takes, and stay with it."""
    trace_at_once(monkeypatch.setattr)


class Remembering(nn.Linear):
    """Adds what it gave in the step before, as a net does with a memory of segments."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.memory = torch.zeros(12, 1)

    def forward(self, x):
        out = super().forward(x) + 0.5 * self.memory
        self.memory = out.detach()
        return out


class Queueing(nn.Linear):
    """Keeps its memory in a list that stays the same object."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.memory = [torch.zeros(12, 1)]

    def forward(self, x):
        out = super().forward(x) + 0.5 * self.memory[0]
        self.memory.append(out.detach())
        self.memory.pop(0)
        return out


class Counting(nn.Linear):
    """Counts its calls in a dictionary."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.numbers = {"calls": 0}

    def forward(self, x):
        self.numbers["calls"] += 1
        return super().forward(x) * (1 + 1e-12 * self.numbers["calls"])


class Recording(nn.Linear):
    """Keeps for evaluation what it gave last."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Noisier(nn.Linear):
    """Draws once more in a record."""

    def forward(self, x):
        if is_recording():
            torch.randn(())
        return super().forward(x)


class Larger(nn.Linear):
    """Computes something else in a record."""

    factor: float

    def forward(self, x):
        return super().forward(x) * (self.factor if is_recording() else 1.0)


class LargerByRounding(Larger):
    factor = 1 + 1e-13


class LargerByMuch(Larger):
    factor = 1 + 1e-6


def elbos_of(layer, compiled):
    pyro.set_rng_seed(0)
    model = ps.Regressor(ps.bayesianize(layer(3, 1), prior=1.0), 12, noise_scale=0.3)
    guide, data = ps.MeanFieldGuide(model), regression_data()
    return ps.fit(model, guide, data, num_steps=7, compiled=compiled, progress=False)


@pytest.mark.parametrize(
    ("layer", "compiled", "reason"),
    [
        (Remembering, "auto", "a step changes `memory` of module .*Remembering, which a replay"),
        (Queueing, "auto", "a step changes `memory` of module .*Queueing, which a replay"),
        (Recording, "auto", "a step changes `last` of module .*Recording, which a replay"),
        (Counting, "auto", "a step changes `numbers` of module .*Counting, which a replay"),
        (Noisier, "auto", "traced, it draws other random numbers than by Python"),
        (LargerByMuch, "auto", r"traced, its numbers differ .*, the loss by \de-0\d of it"),
        (LargerByRounding, "traced", r"traced, its numbers differ .*, the loss by \de-1\d of it"),
    ],
)
def test_a_trace_that_is_not_the_step_of_python_is_not_replayed(
    layer, compiled, reason, traced_fit
):
    history = elbos_of(layer, compiled)
    (note,) = history.compilation
    assert re.search(r"^Step \d: eager: .*" + reason, note), note
    assert history.elbo == elbos_of(layer, False).elbo


def test_a_trace_that_rounds_otherwise_is_replayed_where_that_may_be(traced_fit, monkeypatch):
    monkeypatch.setattr(steps, "TIMED", 1)
    monkeypatch.setattr(steps, "COMPILING_AT_LEAST", FOREVER)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=count().__next__))
    history = elbos_of(LargerByRounding, "auto")
    assert re.search("traced in", history.compilation[0])
    assert history.elbo == pytest.approx(elbos_of(LargerByRounding, False).elbo, rel=1e-10)


def test_a_compiled_step_is_refused_after_the_step_that_shows_it():
    """The step that is compared is taken by Python."""
    model = ps.Regressor(ps.bayesianize(LargerByMuch(3, 1), prior=1.0), 12, noise_scale=0.3)
    svi = ps.CompiledSVI(model, ps.MeanFieldGuide(model), adam(), ps.StructuredELBO(), backend=None)
    for _ in range(3):
        svi.step(*regression_data())
    with pytest.raises(RuntimeError, match=r"its numbers differ from Python's.*`fallback"):
        svi.step(*regression_data())
    assert svi.loss.step == 3


class CountingCalls(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_a_step_changes_is_looked_at_after_a_step_that_fails(number):
    model = ps.Regressor(ps.bayesianize(CountingCalls(3, 1), prior=1.0), 12, noise_scale=0.3)
    guide, (x, y) = ps.MeanFieldGuide(model), regression_data()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None, fallback=True)

    def take_steps():
        for step in range(8):
            if step == number:
                with pytest.raises(FloatingPointError):
                    svi.step(torch.full_like(x, torch.nan), y)
            svi.step(x, y)

    with pytest.warns(CompileFallbackWarning, match="a step changes `calls`"):
        take_steps()
    assert model.net.calls >= 9
