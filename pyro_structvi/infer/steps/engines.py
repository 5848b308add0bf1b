"""Which engine takes the steps of a fit."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pyro_structvi.infer.steps.auto import AutoStep
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.step import Check, Step

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
