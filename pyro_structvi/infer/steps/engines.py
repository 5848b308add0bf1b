"""Engines of training steps: eager, compiled, or chosen by measured times."""

import math
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi._checks import shape_text, warn_user
from pyro_structvi._pyro import stored_parameter
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.steps.modules import generators_of
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import Outputs, explain
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Call, Check, Loss, Step, SubsampleRecorder, numbers_of
from pyro_structvi.infer.terms import ELBOTerms


class EagerStep(Step):
    """A step as ``SVI`` takes it, but with one optimizer.

    Args:
        loss: The loss.
        optimizer: What updates the parameters; one made of Pyro's adopts those that a step meets.
        check: See :class:`Step`.
    """

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers."""
        if self.optimizer.is_pyros:
            with poutine.trace(param_only=True) as capture:
                loss, terms = self._differentiate(args, kwargs)
            met = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
            if isinstance(terms, ELBOTerms):
                self.optimizer.adopt(dict.fromkeys(met))
        else:
            loss, terms = self._differentiate(args, kwargs)
        numbers = numbers_of(loss, terms, [p.grad for p in self.optimizer.parameters])
        if not self.loss.is_structured:
            numbers[1:3] = math.nan
        return self._update((args, kwargs), numbers, terms)

    def _differentiate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Give the parameters their gradients; return the loss and its terms."""
        if not self.loss.is_structured:
            loss = self.loss.elbo.loss_and_grads(*self.loss.parts, *args, **kwargs)
            return torch.tensor(float(loss)), ELBOTerms({}, {})
        loss, terms = self.loss(*args, **kwargs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return loss, terms


MANY_KINDS = 16


class CompileFallbackWarning(UserWarning):
    """A step could not be compiled, and runs as ``SVI`` would run it."""


class NotCompiledError(Exception):
    """A step could not be compiled; the message says why."""


class _UndoneError(Exception):
    """A step is to be undone."""


class CompiledStep(Step):
    """Takes the first two steps of each kind of call eagerly, and traces the second besides.

    From the third on it replays the trace, unless that gave another loss or drew other random numbers.

    Args:
        loss: The loss.
        optimizer: What updates the parameters.
        check: See :class:`Step`.
        backend: A backend of ``torch.compile``, None, or "auto".
        fallback: Whether a step that cannot be compiled is taken eagerly, with a warning.
        watches: Whether other code may change model and guide between steps, so that each step looks.
        is_exact: Whether a trace must give Python's numbers to the last bit, and not to rounding.

    Attributes:
        eager: The engine of first steps.
        kinds: The steps that have been compiled, by arguments and by the state of model and guide.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        check: Check | None = None,
        *,
        backend: str | None = "auto",
        fallback: bool = False,
        watches: bool = True,
        is_exact: bool = False,
    ) -> None:
        super().__init__(loss, optimizer, check)
        self._watches, self._is_exact = watches, is_exact
        self._numbers = torch.zeros(4)  # of the last eager step, on this rank
        self._last_state: Hashable = None
        self._has_replayed = False  # whether the last step ran no Python but this package's
        self.eager = EagerStep(loss, optimizer, self._check_first)
        self._backend, self._fallback = backend, fallback
        self._stored: list[str] = []  # names of what is found in Pyro's store
        self.kinds: dict[Hashable, ReplayedStep] = {}
        self._uncompiled: set[Hashable] = set()  # calls that have fallen back
        self._drawing_in_python: set[Hashable] = set()

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers.

        Raises:
            RuntimeError: If the step cannot be compiled; nothing has changed.
        """
        call = Call(args, kwargs)
        if call.key in self._uncompiled:
            return self.eager.take(args, kwargs)
        step = self.kind_of(call)
        if step is None:
            return self.take_first(call)
        try:
            return self.replay(step, call)
        except NotCompiledError as error:
            if not self._fallback:
                raise RuntimeError(
                    f"{error} Pass `fallback=True` to go on without."
                ) from error.__cause__
            self._fall_back(call, str(error))
        return self.eager.take(args, kwargs)

    def kind_of(self, call: Call) -> ReplayedStep | None:
        """Return the step that a call shares with others of its kind, or None before the first."""
        if self.optimizer.was_loaded():
            self.kinds.clear()
        if self._watches or not self._has_replayed:
            self._last_state = self._state()
        self._has_replayed = False
        step = self.kinds.get((call.key, self._last_state))
        return step if step is None or step.holds else None

    def take_first(self, call: Call) -> list[float]:
        """Take the first step of a kind, an eager one, which finds parameters and plates."""
        generators = _python_generators()
        with poutine.trace(param_only=True) as capture, SubsampleRecorder() as recorder:
            numbers = self.eager.take(call.args, call.kwargs)
        if _python_generators() != generators:
            self._drawing_in_python.add(call.key)
        self.loss.zero_grad()  # also of what the optimizer does not train
        self._stored = [name for name in capture.trace.nodes if stored_parameter(name) is not None]
        self.optimizer.was_loaded()
        if not self.loss.is_structured:
            self._fall_back(call, f"{type(self.loss.elbo).__name__} cannot be compiled.")
            return numbers
        checks = self._check is not None
        alone = not self.optimizer.runs_hooks
        updates = alone and (not checks or self.optimizer.can_skip)
        step = ReplayedStep(
            self.loss, self.optimizer, recorder.draws, self._backend, updates, checks
        )
        step.keeps = [*self._modules.parts(), *map(stored_parameter, self._stored)]
        self.kinds[call.key, self._state()] = step  # now that the parameters are known
        if len(self.kinds) == MANY_KINDS:
            warn_user(
                f"{MANY_KINDS} kinds of steps have been compiled, by shapes, arguments and modes. Pass "
                "numbers that change as tensors, and pad what has many sizes.",
                UserWarning,
            )
        return numbers

    def _check_first(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Refuse an optimizer of parameters that this step does not have, then check numbers."""
        self._numbers = numbers
        own = self._modules.tensors()
        foreign = [
            parameter
            for parameter in self.optimizer.parameters
            if parameter.requires_grad and parameter.grad is None and id(parameter) not in own
        ]
        if foreign and not self.optimizer.is_pyros and isinstance(terms, ELBOTerms):
            shapes = [shape_text(parameter.shape) for parameter in foreign]
            raise ValueError(
                f"`optim` must train parameters of model and guide, but {len(foreign)} of its "
                f"parameters, of shapes {shapes[:3]}, belong to neither. Make it of "
                "`guide.parameters()`, and of `model.parameters()` if there are point estimates."
            )
        return self._read(batch, numbers, terms)

    def replay(self, step: ReplayedStep, call: Call) -> list[float]:
        """Take a step as a former one of its kind, or prepare that.

        Raises:
            NotCompiledError: If it cannot be prepared; nothing has changed.
        """
        if step.difference is None:
            return self._take_compared(step, call)
        if step.refusal:
            raise NotCompiledError(f"This step cannot be compiled: {step.refusal}.")
        if step.is_ready:
            outputs = step(call)
            self._has_replayed = step.has_updated
        else:
            with self._explained(step):
                outputs = self._prepare(step, call)
        batch = call.args, call.kwargs
        if not step.has_updated:
            return self._update(batch, *step.unpack(outputs))
        numbers = outputs[0]
        assert numbers is not None
        read: list[float] = numbers.tolist()
        if self._check is None or math.isfinite(sum(read)):
            return read
        read = self._read(batch, *step.unpack(outputs))
        self.optimizer.forget_gradients()  # which a check may name
        return read

    def _take_compared(self, step: ReplayedStep, call: Call) -> list[float]:
        """Trace a step, undo it, take it by Python, and compare the two."""
        generators, traced = generators_of(self.optimizer.parameters), list[Any]()
        with suppress(_UndoneError), self._explained(step):
            traced = [self._prepare(step, call)[0], *(each.get_state() for each in generators)]
            raise _UndoneError
        read = self.eager.take(call.args, call.kwargs)
        self.loss.zero_grad()  # also of what the optimizer does not train
        own = self._numbers
        eps = torch.finfo(own.dtype).eps
        change = (own - traced[0])[:3].abs().max() / own[:3].abs().max().clamp(min=eps)
        step.difference = float(change)
        is_same = torch.equal(own, traced[0]) if self._is_exact else change <= math.sqrt(eps)
        if not all(map(torch.equal, traced[1:], (each.get_state() for each in generators))):
            step.refusal = "traced, it draws other random numbers than by Python"
        elif not is_same:
            step.refusal = (
                f"traced, its numbers differ from Python's, the loss by {change:.1g} of it"
            )
        return read

    def _prepare(self, step: ReplayedStep, call: Call) -> Outputs:
        """Take the next of the steps that end in a replay without Python."""
        if call.key in self._drawing_in_python:
            raise RuntimeError(
                "a step draws random numbers by Python's `random` or by NumPy, and would repeat "
                "what it has drawn once; draw them by torch"
            )
        with self._modules.plain_changes() as changed:
            outputs = step(call)
        if changed:
            raise RuntimeError(not_repeated(changed))
        return outputs

    @contextmanager
    def _explained(self, step: ReplayedStep) -> Iterator[None]:
        """Leave all as it was where a step cannot be compiled, and say why."""
        trained = self.optimizer.unchanged_on_error() if step.traces_update else nullcontext()
        try:
            with trained, self._modules.unchanged_on_error(self.optimizer.parameters):
                yield
        except _UndoneError:
            raise
        except Exception as error:
            raise NotCompiledError(f"This step cannot be compiled: {explain(error)}.") from error

    def _fall_back(self, call: Call, reason: str) -> None:
        warn_user(f"{reason} The step runs uncompiled.", CompileFallbackWarning)
        self._uncompiled.add(call.key)

    def _state(self) -> Hashable:
        """Return what decides how model and guide run, besides their arguments."""
        parts = self._modules.state()
        parts += [self.loss.elbo.num_particles, self.loss.elbo.vectorize_particles]
        parts.append(self.optimizer.runs_hooks)
        parts += [id(stored_parameter(name)) for name in self._stored]
        for kind in sorted({value.device.type for value in self.optimizer.parameters}):
            parts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        return tuple(parts)


def not_repeated(changed: Sequence[str]) -> str:
    """Say why steps that change these values cannot be replayed."""
    return (
        f"a step changes {', '.join(changed[:3])}, which a replay would not; keep what changes in a "
        "buffer, and change it in place"
    )


def _python_generators() -> list[Any]:
    """Return the states of the random generators that a traced step does not see."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002, that is the one to look at
    return [random.getstate(), of_numpy[2], of_numpy[1].tobytes()]


Way = Literal["eager", "traced", "compiled"]

TIMED = 5  # steps of each way, whose median counts
EAGER = 4  # steps before any other; the first is not timed
STEPS_FOR_TRACING = (
    300  # tracing takes what 100 to 200 eager steps take, and saves half of each or more
)
MOST_KINDS = MANY_KINDS - 1  # that are kept, of which nothing is said yet

# What inductor takes, in seconds and per second that tracing took. Where tracing has saved much of an
# eager step, its operations are small, and fusing them saves much of a traced one (docs/speed.md).
COMPILING_AT_LEAST, COMPILING_PER_TRACING = 5.0, 15.0
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
        costs = COMPILING_AT_LEAST + COMPILING_PER_TRACING * kind.preparing["traced"]
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
