"""Engines of training steps: eager, compiled, or chosen by measured times."""

import time
from collections import defaultdict
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

TIMED = 5  # steps of each way; their median counts
EAGER = 4  # steps before a record; the first is not timed
STEPS_FOR_TRACING = 100  # to come; a record costs two to four eager steps
MOST_KINDS = MANY_KINDS - 1  # the engine warns at one more

# Seconds that inductor takes. Its gain is estimated by that of the record: operations are small where
# Python was most of an eager step, and fusing them saves most of a traced one (docs/how_to/speed.md).
COMPILING_AT_LEAST, COMPILING_PER_OPERATION = 5.0, 0.008
SAVED_PER_TRACING = 0.7  # share of a traced step, per share of an eager one


@dataclass
class Kind:
    """Times of the steps of one kind, which share shapes, arguments and modes.

    Attributes:
        way: How they are taken.
        is_settled: Whether the way is final.
        count: The number of steps so far.
        seconds: The durations of steps, by way.
        preparing: The seconds of preparation, by way.
    """

    way: Way = "eager"
    is_settled: bool = False
    count: int = 1
    seconds: dict[Way, list[float]] = field(default_factory=lambda: defaultdict(list))
    preparing: dict[Way, float] = field(default_factory=lambda: defaultdict(float))

    def usual(self, way: Way) -> float:
        """Return the median duration of a step, in seconds."""
        return median(self.seconds[way])


class AutoStep(Step):
    """Takes eager, replayed or compiled steps, by their measured durations.

    A kind of step is recorded after a few eager ones if many are to come, and compiled if the steps to
    come save more time than compiling takes. A slower way is given up. Every step is a real one with
    the noise of an eager step.

    Args:
        loss: The loss.
        optimizer: The optimizer.
        check: See :class:`Step`.
        num_steps: The number of steps to come.
        may_compile: Whether inductor may compile, which changes rounding.
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
        exact = {"is_exact": not may_compile, "watches": watches}
        self._engine = CompiledStep(loss, optimizer, check, backend=None, **exact)
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
        way, start = kind.way, time.perf_counter()
        was_ready = way == "eager" or step.is_ready
        numbers = (
            self._take_eager(call) if way == "eager" else self._take_replayed(kind, step, call)
        )
        seconds = time.perf_counter() - start
        kind.count += 1
        if was_ready:
            kind.seconds[way].append(seconds)
        else:
            kind.preparing[way] += seconds
        if not kind.is_settled and not self._is_off:
            self._decide(kind, step)
        return numbers

    def _take_first(self, call: Call) -> list[float]:
        if len(self._engine.kinds) == MOST_KINDS:
            self._turn_off(
                f"there are more than {MOST_KINDS} kinds of steps, by shapes, arguments, modes and "
                "values that Python reads"
            )
            return self._engine.eager.take(call.args, call.kwargs)
        return self._engine.take_first(call)

    def _take_eager(self, call: Call) -> list[float]:
        """Take an eager step, and turn off if Python changes state in it."""
        with self._modules.plain_changes() as changed:
            numbers = self._engine.eager.take(call.args, call.kwargs)
        if changed:
            self._turn_off(not_repeated(changed))
        return numbers

    def _take_replayed(self, kind: Kind, step: ReplayedStep, call: Call) -> list[float]:
        """Replay a step, or fall back to the previous way if that fails."""
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
        elif len(kind.seconds[kind.way]) >= TIMED:
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
    """Return the durations of a way and of another one as a text."""
    own, others = 1e3 * kind.usual(kind.way), 1e3 * kind.usual(other)
    return f"in {kind.preparing[kind.way]:.2g} s, {own:.3g} ms a step, {others:.3g} ms {other}"


Engine = Callable[[Loss, OneOptimizer, Check], Step]
Compiled = Literal["auto", "traced", True, False]


def engine_of_fit(
    compiled: Compiled, num_steps: int, has_checkpoints: bool, watches: bool
) -> Engine:
    """Return the constructor of the engine of a fit.

    Args:
        compiled: The option of ``fit``.
        num_steps: The number of steps to come.
        has_checkpoints: Whether the run may be resumed; a compiled step would begin elsewhere then.
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
    """Whether a value is a user's function, which may change model and guide when it is called."""
    return callable(value) and not type(value).__module__.startswith("pyro_structvi.")
