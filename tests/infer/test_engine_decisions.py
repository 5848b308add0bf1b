"""When an automatic step goes from one engine to another."""

from types import SimpleNamespace

import pyro
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.infer.steps import engines
from pyro_structvi.infer.steps.compiled import CompiledStep, EagerStep, NotCompiledError
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import Record
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Loss
from tests.infer.test_engines import ways
from tests.infer.test_training import make, snapshot


class Timed:
    """Steps that take the seconds that they are said to take, on a clock that only they move."""

    def __init__(self, monkeypatch, eager=0.004, traced=0.001, compiled=0.0005):
        self.seconds = {"eager": eager, "traced": traced, "compiled": compiled}
        self.now, self.backends, self.refuses = 0.0, [], set()
        monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(
            EagerStep, "take_eagerly", lambda step, args, kwargs: self.take("eager")
        )
        monkeypatch.setattr(
            CompiledStep, "replay", lambda engine, step, call: self.replay(engine, step)
        )
        monkeypatch.setattr(ReplayedStep, "compile", lambda step, backend: self.compile(backend))
        monkeypatch.setattr(ReplayedStep, "interpret", lambda step: self.interpret())
        monkeypatch.setattr(ReplayedStep, "is_ready", property(lambda step: self.to_prepare == 0))
        monkeypatch.setattr(ReplayedStep, "num_operations", 10)
        self.way, self.to_prepare = "traced", 2

    def compile(self, backend):
        self.backends.append(backend)
        self.way, self.to_prepare = "compiled", 1

    def interpret(self):
        self.backends.append(None)
        self.way, self.to_prepare = "traced", 1

    def take(self, way):
        self.now += self.seconds[way]
        return [1.0, 2.0, 3.0, 4.0]

    def replay(self, engine, step):
        assert step in engine.kinds.values()
        step.eager_seconds = self.seconds["eager"]
        if self.to_prepare:
            if self.way in self.refuses:
                raise NotCompiledError(f"{self.way} fails")
            self.now += 12.5 if self.way == "compiled" else 0.25
            self.to_prepare -= 1
        return self.take(self.way)


def let_compiling_take(seconds, monkeypatch):
    """Let a record of 10 operations be expected to take this long."""
    monkeypatch.setattr(engines, "COMPILING_AT_LEAST", seconds / 4)
    monkeypatch.setattr(engines, "COMPILING_PER_OPERATION", 0.075 * seconds)


def fit_timed(timed, num_steps, **options):
    timed.way, timed.to_prepare = "traced", 2
    model, guide, data = make()
    return ps.fit(model, guide, data, num_steps=num_steps, progress=False, **options)


def test_few_steps_are_eager(monkeypatch):
    timed = Timed(monkeypatch)
    assert fit_timed(timed, 100).compilation == []
    assert timed.now == pytest.approx(100 * 0.004)


def test_many_steps_are_traced_and_more_are_compiled(monkeypatch):
    """Compiling is expected to take 0.197 s, which 375 steps to come save at 0.525 ms each."""
    timed = Timed(monkeypatch)
    assert fit_timed(timed, 310).compilation == ["Step 8: traced in 0.5 s, 1 ms a step, 4 ms eager"]
    let_compiling_take(0.375 * 0.525, monkeypatch)
    assert ways(fit_timed(timed, 380)) == ["traced"]
    assert timed.backends == []
    notes = fit_timed(timed, 390).compilation
    assert notes[1] == "Step 14: compiled in 13 s, 0.5 ms a step, 1 ms traced"
    assert timed.backends == ["inductor"]


def test_where_tracing_saves_nothing_nothing_is_compiled(monkeypatch):
    """As of large products: a hundredth saved of 1 ms means 0.0173 s in 2,491 steps to come."""
    let_compiling_take(0.012, monkeypatch)
    for eager, expected in ((0.00100001, []), (0.00101, ["inductor"])):
        timed = Timed(monkeypatch, eager=eager)
        assert ways(fit_timed(timed, 2500))[0] == "traced"
        assert timed.backends == expected


@pytest.mark.parametrize("asked", ["traced", "auto"])
def test_a_fit_that_is_asked_to_or_has_checkpoints_only_traces(asked, monkeypatch, tmp_path):
    """With checkpoints it would go on with other roundings than without a break."""
    let_compiling_take(0.0, monkeypatch)
    timed = Timed(monkeypatch)
    path = {} if asked == "traced" else {"checkpoint": ps.Checkpoint(tmp_path / "fit.pt")}
    assert ways(fit_timed(timed, 390, compiled=asked, **path)) == ["traced"]
    assert timed.backends == []


def test_a_way_that_is_slower_is_left(monkeypatch):
    let_compiling_take(0.1, monkeypatch)
    timed = Timed(monkeypatch, traced=0.005)
    (note,) = fit_timed(timed, 400).compilation
    assert note == "Step 8: eager: traced steps take longer: in 0.51 s, 5 ms a step, 4 ms eager"
    timed = Timed(monkeypatch, compiled=0.002)
    notes = fit_timed(timed, 400).compilation
    assert notes[1].startswith("Step 14: not compiled: compiled steps take longer")
    assert timed.backends == ["inductor", None]


def test_a_way_that_fails_is_left(monkeypatch):
    let_compiling_take(0.1, monkeypatch)
    timed = Timed(monkeypatch)
    timed.refuses = {"compiled"}
    assert fit_timed(timed, 400).compilation[1] == "Step 9: not compiled: compiled fails"
    assert timed.backends == ["inductor", None]
    timed.refuses = {"traced"}
    assert fit_timed(timed, 400).compilation == ["Step 2: eager: traced fails"]


@pytest.mark.slow
def test_a_fit_that_compiles_is_that_with_eager_steps(monkeypatch):
    monkeypatch.setattr(engines, "STEPS_FOR_TRACING", 0)
    let_compiling_take(0.0, monkeypatch)
    elbos = []
    for compiled in (False, "auto"):
        pyro.set_rng_seed(0)
        model, guide, data = make()
        history = ps.fit(model, guide, data, num_steps=25, compiled=compiled, progress=False)
        elbos.append(history.elbo)
    assert elbos[1] == pytest.approx(elbos[0], rel=1e-9)
    assert any("compiled" in note for note in history.compilation)


def test_a_compiled_record_with_other_numbers_is_refused(monkeypatch):
    """As those of a compiler that draws in another order; the step that is compared is Python's."""
    states = []
    for compiles in (False, True):
        pyro.set_rng_seed(0)
        model, guide, data = make()
        guide.initialize(*data)
        loss = Loss(model, guide, ps.StructuredELBO())
        adam = OneOptimizer(torch.optim.Adam(guide.parameters(), fused=True))
        engine = CompiledStep(loss, adam, backend=None)
        for _ in range(4):
            engine(*data)
        if compiles:
            (step,) = engine.kinds.values()
            monkeypatch.setattr(Record, "compile", compile_wrongly)
            step.compile("inductor")
        engine(*data)
        states.append(snapshot(guide))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    with pytest.raises(RuntimeError, match="traced, its numbers differ from Python's"):
        engine(*data)


def compile_wrongly(record, backend, inputs):
    run = record._run

    def wrong(*tensors):
        numbers, *others = run(*tensors)
        return 1.1 * numbers, *others

    record._run = wrong
