"""Engines of training steps: eager, compiled, or chosen by the number of steps to come."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import NotCompiledError, explained
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Call, Loss

TIMED = 5  # replays; the shortest counts
STEPS_FOR_TRACING = 100  # to come; a record costs two to four eager steps

# Seconds that inductor takes. Its gain is estimated by that of the record: operations are small where
# Python was most of an eager step, and fusing them saves most of a traced one (docs/how_to/speed.md).
COMPILING_AT_LEAST, COMPILING_PER_OPERATION = 5.0, 0.008
SAVED_PER_TRACING = 0.7  # share of a traced step, per share of an eager one


class AutoStep(CompiledStep):
    """Records a kind of step if many steps are to come, and compiles it if these save the time it takes.

    Args:
        loss: The loss.
        optimizer: The optimizer.
        num_steps: The number of steps to come.
        may_compile: Whether inductor may compile, which changes rounding.
        watches: See :class:`CompiledStep`.
    """

    warns = False

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        *,
        num_steps: int,
        may_compile: bool,
        watches: bool,
    ) -> None:
        own = {"watches": watches, "is_exact": not may_compile}
        super().__init__(loss, optimizer, backend=None, fallback=True, **own)
        on_cpu = all(value.device.type == "cpu" for value in optimizer.parameters)
        self._may_compile = may_compile and on_cpu
        self._num_steps, self._taken = num_steps, 0

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers."""
        self._taken += 1
        return super().take(args, kwargs)

    def _take_first(self, call: Call) -> list[float]:
        if self._num_steps - self._taken < STEPS_FOR_TRACING:
            return self.take_eagerly(call.args, call.kwargs)
        return super()._take_first(call)

    def _take_known(self, step: ReplayedStep, call: Call) -> list[float]:
        if not step.is_ready or len(step.seconds) == TIMED:
            return super()._take_known(step, call)
        start = time.perf_counter()
        numbers = super()._take_known(step, call)
        step.seconds.append(time.perf_counter() - start)
        if len(step.seconds) == TIMED:
            traced, eager = min(step.seconds), step.eager_seconds
            self._note(f"traced in {1e3 * traced:.3g} ms a step, {1e3 * eager:.3g} ms eager")
            to_come = (self._num_steps - self._taken) * step.taken / self._taken
            saved = SAVED_PER_TRACING * (1 - traced / eager) * traced * to_come
            costs = COMPILING_AT_LEAST + COMPILING_PER_OPERATION * step.num_operations
            if self._may_compile and saved > costs:
                self._compile(step, call)
        return numbers

    def _compile(self, step: ReplayedStep, call: Call) -> None:
        start = time.perf_counter()
        try:
            with explained():
                step.compile("inductor", call)
            self._note(f"compiled in {time.perf_counter() - start:.2g} s")
        except NotCompiledError as error:
            self._refuse(step, call, str(error))

    def _refuse(self, step: ReplayedStep, call: Call, reason: str) -> None:
        if step.seconds:  # the record is Python's step, and inductor's is not
            step.interpret()
            self._note(f"not compiled: {reason}")
        else:
            super()._refuse(step, call, reason)


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
