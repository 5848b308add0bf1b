"""Engines of training steps: eager, compiled, or chosen by measured times."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pyro_structvi.infer.steps.compiled import (
    CompiledStep,
    EagerStep,
    NotCompiledError,
    not_repeated,
)
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Call, Loss

TIMED = 5  # replays of each way; the shortest counts
STEPS_FOR_TRACING = 100  # to come; a record costs two to four eager steps

# Seconds that inductor takes. Its gain is estimated by that of the record: operations are small where
# Python was most of an eager step, and fusing them saves most of a traced one (docs/how_to/speed.md).
COMPILING_AT_LEAST, COMPILING_PER_OPERATION = 5.0, 0.008
SAVED_PER_TRACING = 0.7  # share of a traced step, per share of an eager one


@dataclass
class Times:
    """Seconds of the steps of one kind, which share shapes, arguments and modes.

    Attributes:
        way: How they are taken.
        is_settled: Whether the way is final.
        count: The number of steps so far.
        preparing: The preparation of each way.
        steps: The durations of prepared steps, of each way.
    """

    way: Literal["traced", "compiled"] = "traced"
    is_settled: bool = False
    count: int = 1
    preparing: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class AutoStep(CompiledStep):
    """Takes eager, replayed or compiled steps, by their measured durations.

    A kind of step is recorded if many steps are to come, and compiled if these save more time than
    compiling takes. A slower way is given up. Every step is a real one with the noise of an eager step.

    Args:
        loss: The loss.
        optimizer: The optimizer.
        num_steps: The number of steps to come.
        may_compile: Whether inductor may compile, which changes rounding.
        watches: See :class:`CompiledStep`.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        *,
        num_steps: int,
        may_compile: bool = True,
        watches: bool = True,
    ) -> None:
        own = {"watches": watches, "is_exact": not may_compile}
        super().__init__(loss, optimizer, backend=None, fallback=True, **own)
        on_cpu = all(value.device.type == "cpu" for value in optimizer.parameters)
        self._may_compile = may_compile and on_cpu
        self._num_steps, self._taken = num_steps, 0
        self._times: dict[ReplayedStep, Times] = {}
        self._is_off = False

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers."""
        self._taken += 1
        if self._is_off:
            return self.take_eagerly(args, kwargs)
        try:
            call = Call(args, kwargs)
        except TypeError as error:
            self._is_off = True
            self._say(str(error))
            return self.take_eagerly(args, kwargs)
        return self.take_call(call)

    def _take_first(self, call: Call) -> list[float]:
        """Take a step eagerly, without a record later if few steps are to come."""
        if self._num_steps - self._taken < STEPS_FOR_TRACING:
            return self.take_eagerly(call.args, call.kwargs)
        return super()._take_first(call)

    def _take_second(self, call: Call) -> list[float]:
        """Take a step eagerly, and go on so if it changes what its record would change once more."""
        with self._modules.plain_changes() as changed:
            numbers = self.take_eagerly(call.args, call.kwargs)
        if changed:
            self._fall_back(call, not_repeated(changed))
        return numbers

    def replay(self, step: ReplayedStep, call: Call) -> list[float]:
        """Replay a step and measure it, until the way of its kind is settled."""
        times = self._times.setdefault(step, Times())
        times.count += 1
        if times.count == 2:
            return self._take_second(call)
        if times.is_settled:
            return super().replay(step, call)
        was_ready, start = step.is_ready, time.perf_counter()
        try:
            numbers = super().replay(step, call)
        except NotCompiledError as error:
            if times.way == "traced":
                raise
            self._uncompile(times, step, str(error))
            return super().replay(step, call)
        seconds = time.perf_counter() - start
        if was_ready:
            times.steps[times.way].append(seconds)
        else:
            times.preparing[times.way] += seconds
        if len(times.steps[times.way]) == TIMED:
            self._decide(times, step, call)
        return numbers

    def _decide(self, times: Times, step: ReplayedStep, call: Call) -> None:
        """Leave a way that is slower than the one before; else settle on it, or compile."""
        is_traced, own = times.way == "traced", min(times.steps[times.way])
        before = step.eager_seconds if is_traced else min(times.steps["traced"])
        compared = (
            f"in {times.preparing[times.way]:.2g} s, {1e3 * own:.3g} ms a step, "
            f"{1e3 * before:.3g} ms {'eager' if is_traced else 'traced'}"
        )
        if own > before:
            reason = f"{times.way} steps take longer: {compared}"
            if is_traced:
                self._fall_back(call, reason)
            else:
                self._uncompile(times, step, reason)
            return
        rounded = f"; rounded otherwise by {step.difference:.1g}" if step.difference else ""
        self._note(f"{times.way} {compared}{rounded}")
        to_come = (self._num_steps - self._taken) * times.count / self._taken
        saved = SAVED_PER_TRACING * (1 - own / before) * own * to_come
        costs = COMPILING_AT_LEAST + COMPILING_PER_OPERATION * step.num_operations
        if is_traced and self._may_compile and saved > costs:
            step.compile("inductor")
            times.way = "compiled"
        else:
            times.is_settled = True

    def _uncompile(self, times: Times, step: ReplayedStep, reason: str) -> None:
        step.interpret()
        times.way, times.is_settled = "traced", True
        self._note(f"not compiled: {reason}")

    def _say(self, reason: str) -> None:
        self._note(f"eager: {reason}")

    def _note(self, text: str) -> None:
        self.notes.append(f"Step {self.loss.elbo.step}: {text}")


Engine = Callable[[Loss, OneOptimizer], EagerStep]
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
    if compiled is True:
        return partial(CompiledStep, watches=watches)
    may_compile = compiled == "auto" and not has_checkpoints
    return partial(AutoStep, num_steps=num_steps, may_compile=may_compile, watches=watches)


def may_change_modules(value: Any) -> bool:
    """Whether a value is a user's function, which may change model and guide when it is called."""
    return callable(value) and not type(value).__module__.startswith("pyro_structvi.")
