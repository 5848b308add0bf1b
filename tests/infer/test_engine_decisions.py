"""When an automatic step goes from one engine to another."""

from types import SimpleNamespace

import pyro
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.infer.steps import compiled as steps
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.recording import Record
from pyro_structvi.infer.steps.replayed import ReplayedStep
from tests.infer.test_engines import ways
from tests.infer.test_training import make, snapshot


class Timed:
    """Steps that take the seconds that they are said to take, on a clock that only they move."""

    def __init__(self, monkeypatch, eager=0.004, traced=0.001, compiling=12.5, fails=False):
        self.eager, self.traced, self.compiling, self.fails = eager, traced, compiling, fails
        self.now, self.backends = 0.0, []
        monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(EagerStep, "take", lambda step, args, kwargs: self.take(self.eager))
        for name in ("_watch", "_compare", "_replay"):
            monkeypatch.setattr(CompiledStep, name, lambda *args: self.replay(*args))
        monkeypatch.setattr(
            ReplayedStep, "compile", lambda step, backend, call: self.compile(backend)
        )
        monkeypatch.setattr(ReplayedStep, "interpret", lambda step: self.backends.append(None))
        monkeypatch.setattr(ReplayedStep, "num_operations", 10)

    def compile(self, backend):
        self.backends.append(backend)
        self.now += self.compiling
        if self.fails:
            raise RuntimeError("no compiler")

    def take(self, seconds):
        self.now += seconds
        return [1.0, 2.0, 3.0, 4.0]

    def replay(self, engine, step, call):
        assert engine.kind_of(call) is step
        step.eager_seconds = self.eager
        return self.take(self.traced if step.taken > 4 else self.eager)


def let_compiling_take(seconds, monkeypatch):
    """Let a record of 10 operations be expected to take this long."""
    monkeypatch.setattr(steps, "COMPILING_AT_LEAST", seconds / 4)
    monkeypatch.setattr(steps, "COMPILING_PER_OPERATION", 0.075 * seconds)


def fit_timed(num_steps, **options):
    model, guide, data = make()
    return ps.fit(model, guide, data, num_steps=num_steps, progress=False, **options)


TRACED = "Step 8: traced in 1 ms a step, 4 ms eager"


def test_few_steps_are_eager(monkeypatch):
    timed = Timed(monkeypatch)
    assert fit_timed(100).compilation == []
    assert timed.now == pytest.approx(100 * 0.004)


def test_many_steps_are_traced_and_more_are_compiled(monkeypatch):
    """Compiling is expected to take 0.197 s, which 375 steps to come save at 0.525 ms each."""
    timed = Timed(monkeypatch)
    assert fit_timed(310).compilation == [TRACED]
    let_compiling_take(0.375 * 0.525, monkeypatch)
    assert fit_timed(380).compilation == [TRACED]
    assert timed.backends == []
    assert fit_timed(390).compilation == [TRACED, "Step 8: compiled in 12 s"]
    assert timed.backends == ["inductor"]


def test_where_tracing_saves_nothing_nothing_is_compiled(monkeypatch):
    """As of large products: a hundredth saved of 1 ms means 0.0017 s in 242 steps to come."""
    let_compiling_take(0.0012, monkeypatch)
    for eager, expected in ((0.0009, []), (0.00100001, []), (0.00101, ["inductor"])):
        timed = Timed(monkeypatch, eager=eager)
        assert ways(fit_timed(250))[0] == "traced"
        assert timed.backends == expected


@pytest.mark.parametrize("asked", ["traced", "auto"])
def test_a_fit_that_is_asked_to_or_has_checkpoints_only_traces(asked, monkeypatch, tmp_path):
    """With checkpoints it would go on with other roundings than without a break."""
    let_compiling_take(0.0, monkeypatch)
    timed = Timed(monkeypatch)
    path = {} if asked == "traced" else {"checkpoint": ps.Checkpoint(tmp_path / "fit.pt")}
    assert ways(fit_timed(390, compiled=asked, **path)) == ["traced"]
    assert timed.backends == []


def test_a_step_that_cannot_be_compiled_stays_traced(monkeypatch):
    let_compiling_take(0.1, monkeypatch)
    timed = Timed(monkeypatch, fails=True)
    first, second = fit_timed(400).compilation
    assert first == TRACED
    assert second.startswith("Step 8: not compiled: no compiler, at ")
    assert timed.backends == ["inductor"]
    assert timed.now == pytest.approx(4 * 0.004 + 396 * 0.001 + 12.5)


@pytest.mark.slow
def test_a_fit_that_compiles_is_that_with_eager_steps(monkeypatch):
    monkeypatch.setattr(steps, "STEPS_FOR_TRACING", 0)
    let_compiling_take(0.0, monkeypatch)
    elbos = []
    for compiled in (False, "auto"):
        pyro.set_rng_seed(0)
        model, guide, data = make()
        history = ps.fit(model, guide, data, num_steps=25, compiled=compiled, progress=False)
        elbos.append(history.elbo)
    assert elbos[1] == pytest.approx(elbos[0], rel=1e-9)
    assert any("compiled" in note for note in history.compilation)


def fail(numbers):
    raise RuntimeError("a kernel")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(lambda numbers: 1.1 * numbers, "its numbers differ from Python's"), (fail, "a kernel, at ")],
)
def test_a_compiled_record_with_other_numbers_is_left(wrong, reason, monkeypatch):
    """As those of a compiler that draws in another order; the step that is compared is Python's."""
    monkeypatch.setattr(steps, "STEPS_FOR_TRACING", 0)
    let_compiling_take(0.0, monkeypatch)
    monkeypatch.setattr(Record, "compile", lambda *args: compile_wrongly(wrong, *args))
    found = []
    for compiled in ("traced", "auto"):
        pyro.set_rng_seed(0)
        model, guide, data = make()
        history = ps.fit(model, guide, data, num_steps=15, compiled=compiled, progress=False)
        found.append((history, snapshot(guide)))
    (traced, state), (history, own) = found
    assert ways(traced) == ["traced"]
    assert ways(history) == ["traced", "compiled", "not"]
    assert reason in history.compilation[-1]
    assert history.elbo == traced.elbo
    assert all(torch.equal(value, own[name]) for name, value in state.items())


def compile_wrongly(wrong, record, backend, inputs):
    run = record._run

    def run_wrongly(*tensors):
        numbers, *others = run(*tensors)
        return wrong(numbers), *others

    record._run = run_wrongly
