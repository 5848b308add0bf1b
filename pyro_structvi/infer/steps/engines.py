"""Engines of training steps: eager, compiled, or chosen by measured times."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

from pyro_structvi.infer.steps.compiled import (
    MANY_KINDS,
    CompiledStep,
    EagerStep,
    NotCompiledError,
    not_repeated,
)
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Call, Check, Loss, Step

Way = Literal["eager", "traced", "compiled"]

TIMED = 5  # steps of each way, whose median counts
EAGER = 4  # steps before any other; the first is not timed
STEPS_FOR_TRACING = 100  # to come; a record takes about two eager steps
MOST_KINDS = MANY_KINDS - 1  # that are kept, of which nothing is said yet

# What inductor takes, in seconds and per operation. Where tracing has saved much of an
# eager step, its operations are small, and fusing them saves much of a traced one (docs/speed.md).
COMPILING_AT_LEAST, COMPILING_PER_OPERATION = 5.0, 0.015
SAVED_PER_TRACING = 0.5  # share of a traced step, per share of an eager one


@dataclass
class Kind:
    """What is known of the steps of one kind: that share shapes, arguments and modes.

    Attributes:
        way: How they are taken.
        is_settled: Whether that is how they will be taken.
        count: How many have been taken.
        seconds: What steps took, each way.
        preparing: The seconds that each way took to prepare.
    """

    way: Way = "eager"
    is_settled: bool = False
    count: int = 1
    seconds: dict[Way, list[float]] = field(default_factory=dict)
    preparing: dict[Way, float] = field(default_factory=dict)

    def add(self, seconds: float, was_ready: bool) -> None:
        """Note what a step took."""
        self.count += 1
        if was_ready:
            self.seconds.setdefault(self.way, []).append(seconds)
        else:
            self.preparing[self.way] = self.preparing.get(self.way, 0.0) + seconds

    def usual(self, way: Way) -> float:
        """Return the seconds that a step usually takes, one way."""
        return median(self.seconds[way])


class AutoStep(Step):
    """Takes eager steps, replays what it traces of them, and compiles that, where each pays.

    A kind of step is traced after a few eager ones if many are to come, and compiled if the steps to
    come save more time than compiling takes. What turns out slower than what it replaces goes back, and
    what cannot be traced stays eager. Every step is a real one, and draws the noise that an eager step
    would draw.

    Args:
        loss: The loss.
        optimizer: What updates the parameters.
        check: See :class:`Step`.
        num_steps: How many steps there will be.
        may_compile: Whether inductor may compile; its roundings are others.
        watches: See :class:`CompiledStep`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        check: Check | None = None,
        *,
        num_steps: int,
        may_compile: bool = True,
        watches: bool = True,
    ) -> None:
        super().__init__(loss, optimizer, check)
        own: dict[str, Any] = {"watches": watches}
        self._engine = CompiledStep(
            loss, optimizer, check, backend=None, is_exact=not may_compile, **own
        )
        on_cpu = all(value.device.type == "cpu" for value in optimizer.parameters)
        self._may_compile = may_compile and on_cpu
        self._num_steps, self._taken = num_steps, 0
        self._kinds: dict[ReplayedStep, Kind] = {}
        self._is_off = False

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers."""
        if self._is_off:
            return self._engine.eager.take(args, kwargs)
        self._taken += 1
        try:
            call = Call(args, kwargs)
        except TypeError as error:
            self._turn_off(str(error))
            return self._engine.eager.take(args, kwargs)
        step = self._engine.kind_of(call)
        if step is None:
            return self._take_first(call)
        kind = self._kinds.setdefault(step, Kind())
        if kind.is_settled and kind.way == "eager":
            return self._engine.eager.take(args, kwargs)
        if kind.is_settled:
            return self._engine.replay(step, call)
        start, was_ready = time.perf_counter(), kind.way == "eager" or step.is_ready
        if kind.way == "eager":
            numbers = self._take_eager(call)
        else:
            numbers = self._take_replayed(kind, step, call)
        kind.add(time.perf_counter() - start, was_ready)
        if not kind.is_settled and not self._is_off:
            self._decide(kind, step)
        return numbers

    def _take_first(self, call: Call) -> list[float]:
        if len(self._engine.kinds) == MOST_KINDS:
            self._turn_off(
                f"there are more than {MOST_KINDS} kinds of steps, by shapes, arguments and modes"
            )
            return self._engine.eager.take(call.args, call.kwargs)
        return self._engine.take_first(call)

    def _take_eager(self, call: Call) -> list[float]:
        """Take an eager step, and see whether it changes what a replay would not."""
        with self._modules.plain_changes() as changed:
            numbers = self._engine.eager.take(call.args, call.kwargs)
        if changed:
            self._turn_off(not_repeated(changed))
        return numbers

    def _take_replayed(self, kind: Kind, step: ReplayedStep, call: Call) -> list[float]:
        """Take a step without Python, or prepare it; where that fails, in the way before."""
        try:
            return self._engine.replay(step, call)
        except NotCompiledError as error:
            if kind.way == "traced":
                self._settle(kind, str(error))
                return self._engine.eager.take(call.args, call.kwargs)
            self._uncompile(kind, step, str(error))
            return self._engine.replay(step, call)

    # ---- decisions -------------------------------------------------------------------------------

    def _decide(self, kind: Kind, step: ReplayedStep) -> None:
        """Choose the way of the next step of a kind."""
        if kind.way == "eager":
            if kind.count >= EAGER and self._steps_to_come(kind) >= STEPS_FOR_TRACING:
                kind.way = "traced"
        elif len(kind.seconds.get(kind.way, [])) >= TIMED:
            if kind.way == "compiled":
                self._judge_compiled(kind, step)
            elif kind.usual("traced") > kind.usual("eager"):
                self._settle(kind, f"traced steps take longer: {_compared(kind, 'eager')}")
            else:
                how = f"; rounded otherwise by {step.difference:.1g}" if step.difference else ""
                self._note(f"traced {_compared(kind, 'eager')}{how}")
                self._consider_compiling(kind, step)

    def _consider_compiling(self, kind: Kind, step: ReplayedStep) -> None:
        traced, by_tracing = kind.usual("traced"), 1 - kind.usual("traced") / kind.usual("eager")
        saved = SAVED_PER_TRACING * by_tracing * traced * self._steps_to_come(kind)
        costs = COMPILING_AT_LEAST + COMPILING_PER_OPERATION * step.num_operations
        if self._may_compile and saved > costs:
            step.compile("inductor")
            kind.way = "compiled"
        else:
            kind.is_settled = True

    def _judge_compiled(self, kind: Kind, step: ReplayedStep) -> None:
        if kind.usual("compiled") > kind.usual("traced"):
            self._uncompile(kind, step, f"compiled steps take longer: {_compared(kind, 'traced')}")
        else:
            self._note(f"compiled {_compared(kind, 'traced')}")
            kind.is_settled = True

    def _uncompile(self, kind: Kind, step: ReplayedStep, reason: str) -> None:
        step.interpret()
        kind.way, kind.is_settled = "traced", True
        self._note(f"not compiled: {reason}")

    def _settle(self, kind: Kind, reason: str) -> None:
        """Let the steps of a kind be eager from now on."""
        kind.way, kind.is_settled = "eager", True
        self._note(f"eager: {reason}")

    def _turn_off(self, reason: str) -> None:
        """Let all steps be eager from now on."""
        self._is_off = True
        self._kinds.clear()
        self._engine.kinds.clear()
        self._note(f"eager: {reason}")

    def _steps_to_come(self, kind: Kind) -> float:
        return (self._num_steps - self._taken) * kind.count / self._taken

    def _note(self, text: str) -> None:
        self.notes.append(f"Step {self.loss.elbo.step}: {text}")


def _compared(kind: Kind, other: Way) -> str:
    """Say what a way took to prepare, and what a step takes beside another way."""
    own, others = 1e3 * kind.usual(kind.way), 1e3 * kind.usual(other)
    return f"in {kind.preparing[kind.way]:.2g} s, {own:.3g} ms a step, {others:.3g} ms {other}"


Engine = Callable[[Loss, OneOptimizer, Check], Step]
Compiled = Literal["auto", "traced", True, False]


def engine_of_fit(
    compiled: Compiled, num_steps: int, has_checkpoints: bool, watches: bool
) -> Engine:
    """Return what makes the engine of a fit.

    A trace is replayed where it gave the numbers of Python's step: to the last bit where nothing may be
    compiled, to rounding otherwise. Compiled steps round otherwise, and a run that goes on from a
    checkpoint would compile at another step.

    Args:
        compiled: What the caller of ``fit`` asked for.
        num_steps: How many steps there will be.
        has_checkpoints: Whether the run may go on from a file.
        watches: Whether other code may change model and guide between steps.
    """
    if not compiled:
        return EagerStep
    own: dict[str, Any] = {"watches": watches}
    if compiled is True:
        return partial(CompiledStep, **own)
    may_compile = compiled == "auto" and not has_checkpoints
    return partial(AutoStep, num_steps=num_steps, may_compile=may_compile, **own)


def may_change_modules(value: Any) -> bool:
    """Whether this is a function of others, which may change model and guide when it is called."""
    return callable(value) and not type(value).__module__.startswith("pyro_structvi.")
