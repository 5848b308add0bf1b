"""Training steps that are recorded and replayed, and when: from the start, or where that pays."""

import math
import time
from collections.abc import Hashable
from typing import Any, Literal

import pyro.poutine as poutine
import torch

from pyro_structvi._checks import validates, warn_user
from pyro_structvi._pyro import handlers_around, stored_parameter
from pyro_structvi.infer.steps.eager import EagerStep, Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import NotCompiledError, explained
from pyro_structvi.infer.steps.replayed import Call, ReplayedStep
from pyro_structvi.infer.steps.state import key_of, saved

MOST_KINDS = 32
STEPS_FOR_TRACING = 100  # to come in a fit; a record costs two to four eager steps
TIMED = 5  # replays; the shortest counts

# Seconds that inductor takes. Its gain is estimated by that of the record: operations are small where
# Python was most of an eager step, and fusing them saves most of a traced one (docs/how_to/speed.md).
COMPILING_AT_LEAST, COMPILING_PER_OPERATION = 5.0, 0.008
SAVED_PER_TRACING = 0.7  # share of a traced step, per share of an eager one

Compiled = Literal["auto", "traced", True, False]


class CompileFallbackWarning(UserWarning):
    """A step cannot be compiled and runs as in ``SVI``."""


class CompiledStep(EagerStep):
    """Records the third step of each kind of call, and replays it from the fifth step on.

    The first four steps of a kind are eager. Step two must change no values that a replay would not,
    step three is compared with the record, and step four with a replay. A record is not used if it gives
    another loss or draws other random numbers.

    Args:
        backend: See :class:`CompiledSVI`, as for ``fallback``.
        watches: Whether other code may change model and guide between steps.
        is_exact: Whether a record must have Python's numbers bit for bit instead of up to rounding.
        num_steps: The number of steps to come in a fit. It records if these are many, compiles if these
            save the time that it takes and need not be exact, and writes notes instead of warnings.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        *,
        backend: str | None = "auto",
        fallback: bool = False,
        watches: bool = True,
        is_exact: bool = False,
        num_steps: float = math.inf,
    ) -> None:
        super().__init__(loss, optimizer)
        self._backend, self._fallback = backend, fallback
        self._watches, self._is_exact = watches, is_exact
        self._num_steps, self._taken = num_steps, 0
        self._last_state: Hashable = None  # None where Python has run since
        self._stored: list[str] = []  # names of parameters in Pyro's store
        self._alive: list[object] = []  # tensors that states identify by ``id``
        # By arguments and state: a step for each set of values that Python reads.
        self.kinds: dict[Hashable, list[ReplayedStep]] = {}
        self._refused: dict[Hashable, str] = {}  # reasons, by the key of the call
        self._said: set[str] = set()

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers."""
        self._taken += 1
        try:
            call = Call(args, kwargs)
        except TypeError as error:
            if not self._fallback:
                raise
            self._say(str(error))
            return self._take_eagerly(args, kwargs)
        try:
            if call.key in self._refused:
                raise NotCompiledError(self._refused[call.key])
            return self._take_of_kind(call)
        except NotCompiledError as error:
            reason = self._refuse(call, str(error))
            if not self._fallback:
                message = f"{reason} Pass `fallback=True` to go on without."
                raise RuntimeError(message) from error.__cause__
            return self._take_eagerly(args, kwargs)

    def _take_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        self._last_state = None
        return super().take(args, kwargs)

    # ---- the life of a kind of steps -------------------------------------------------------------

    def kind_of(self, call: Call) -> ReplayedStep | None:
        """Return the step for a call, or None if it is the first call of its kind."""
        if self._watches or self._last_state is None:
            self._last_state = self._state()
        steps = self.kinds.get((call.key, self._last_state), ())
        return next((step for step in steps if step.holds(call)), None)

    def _take_of_kind(self, call: Call) -> list[float]:
        """Take a step as its kind has it, or raise a ``NotCompiledError`` before anything changes."""
        step = call.step = self.kind_of(call)
        if step is None:
            return self._take_first(call)
        step.taken += 1
        numbers = (step.to_come[0] if step.to_come else self._replay)(step, call)
        del step.to_come[:1]
        return numbers

    def _take_first(self, call: Call) -> list[float]:
        """Take the first step of a kind eagerly, and find the parameters."""
        if self._num_steps - self._taken < STEPS_FOR_TRACING:
            return self._take_eagerly(call.args, call.kwargs)
        if sum(map(len, self.kinds.values())) == MOST_KINDS:
            self._say(
                f"There are more than {MOST_KINDS} kinds of steps, by shapes, arguments, attributes of "
                "modules and read values. Pass numbers that change as tensors, or keep them in buffers, "
                "and pad what has many sizes."
            )
            return self._take_eagerly(call.args, call.kwargs)
        with poutine.trace(param_only=True) as capture:
            numbers = self._take_eagerly(call.args, call.kwargs)
        if not any(parameter.requires_grad for parameter in self.optimizer.parameters):
            return numbers  # all are frozen
        self._stored = [name for name in capture.trace.nodes if stored_parameter(name) is not None]
        stored = map(stored_parameter, self._stored)
        self._alive += [*self._modules.tensors(), *self.optimizer.parameters, *stored]
        key = call.key, self._state()  # now that the parameters are known
        in_fit = self._num_steps < math.inf
        step = ReplayedStep(self.loss, self.optimizer, self._backend, not in_fit)
        step.to_come = [self._watch, self._compare, self._compare]  # a record, and a replay
        step.to_come += [self._time for _ in range(TIMED if in_fit else 0)]
        self.kinds.setdefault(key, []).append(step)
        return numbers

    def _watch(self, step: ReplayedStep, call: Call) -> list[float]:
        """Take a step eagerly, and look for changed values that a replay would not change."""
        before = self._modules.state(True)
        numbers = self._take_eagerly(call.args, call.kwargs)
        after = self._modules.state(True).items()
        pairs = [(place, pair) for place, own in after for pair in own]
        changed = [f"`{pair[0]}` of {at}" for at, pair in pairs if pair not in before.get(at, ())]
        if changed:
            what = ", ".join([*dict.fromkeys(changed)][:3])
            self._refuse(
                call,
                f"a step changes {what}, which a replay would not; keep values in buffers, change these "
                "in place, and draw random numbers by torch",
            )
        return numbers

    def _compare(self, step: ReplayedStep, call: Call) -> list[float]:
        """Record or replay a step, undo it, take it by Python, and compare the two."""
        undo = [saved(step.written, step.generators), self._modules.saved(), self.optimizer.saved()]
        try:
            with explained():
                own = step(call, undo).clone()
            drawn = [each.get_state() for each in step.generators]
        finally:
            for restore in undo:
                restore()
            self.optimizer.forget_gradients()
        start = time.perf_counter()
        read = self._take_eagerly(call.args, call.kwargs)
        step.eager_seconds = min(step.eager_seconds, time.perf_counter() - start)
        numbers, eps = self._numbers, torch.finfo(self._numbers.dtype).eps
        change = float((numbers - own)[:3].abs().max() / numbers[:3].abs().max().clamp(min=eps))
        if not all(map(torch.equal, drawn, [each.get_state() for each in step.generators])):
            self._refuse(call, "traced, it draws other random numbers than by Python")
        elif not (torch.equal(numbers, own) if self._is_exact else change <= math.sqrt(eps)):
            how = f"the loss by {change:.1g} of it"
            self._refuse(call, f"traced, its numbers differ from Python's, {how}")
        return read

    def _replay(self, step: ReplayedStep, call: Call) -> list[float]:
        """Replay a step; one that fails or is not finite is undone and taken by Python."""
        restore, failure = saved(step.buffers, step.generators), ""
        try:
            try:
                read: list[float] = step(call).tolist()
            except (IndexError, RuntimeError) as error:  # of a kernel, which knows no input's name
                read, failure = [math.nan] * 4, f"its replay raises: {error}"
            if math.isfinite(sum(read[1:])):  # else parameters are those before the step
                if not step.updates:
                    self._last_state = None
                    self.optimizer.step()
                return read
        except BaseException:
            restore()
            raise
        restore()
        self.optimizer.forget_gradients()
        numbers = self._take_eagerly(call.args, call.kwargs)  # which names the inputs or terms
        if failure:  # where Python does not fail
            self._refuse(call, failure)
        return numbers

    def _refuse(self, call: Call, reason: str) -> str:
        """Do not compile steps with such arguments from now on; return the reason as a sentence."""
        sentence = f"This step cannot be compiled: {reason}."
        if call.step is not None and call.step.is_compiled:
            call.step.interpret()  # the record is Python's step, and inductor's is not
            self._note(f"not compiled: {reason}")
        else:
            self._refused[call.key] = reason
            if self._fallback:
                self._say(sentence)
        return sentence

    # ---- compiling, in a fit ---------------------------------------------------------------------

    def _time(self, step: ReplayedStep, call: Call) -> list[float]:
        """Replay a step; after the last one that is timed let inductor compile, if that pays."""
        start = time.perf_counter()
        numbers = self._replay(step, call)
        step.seconds = min(step.seconds, time.perf_counter() - start)
        if not step.to_come[1:]:
            traced, eager = step.seconds, step.eager_seconds
            self._note(f"traced in {1e3 * traced:.3g} ms a step, {1e3 * eager:.3g} ms eager")
            to_come = (self._num_steps - self._taken) * step.taken / self._taken
            gain = SAVED_PER_TRACING * (1 - traced / eager) * traced * to_come
            costs = COMPILING_AT_LEAST + COMPILING_PER_OPERATION * step.num_operations
            if gain > costs and not self._is_exact and step.device.type == "cpu":
                self._compile(step, call)
        return numbers

    def _compile(self, step: ReplayedStep, call: Call) -> None:
        start = time.perf_counter()
        try:
            with explained():
                step.compile("inductor", call)
        except NotCompiledError as error:
            self._note(f"not compiled: {error}")
        else:
            step.to_come.append(self._compare)
            self._note(f"compiled in {time.perf_counter() - start:.2g} s")

    def _say(self, reason: str) -> None:
        """Say once why steps run eagerly."""
        if reason not in self._said:
            self._said.add(reason)
            self._note(f"eager: {reason}")
            if self._num_steps == math.inf:
                warn_user(f"{reason} The step runs uncompiled.", CompileFallbackWarning)

    def _note(self, text: str) -> None:
        self.notes.append(f"Step {self.loss.elbo.step}: {text}")

    def _state(self) -> Hashable:
        """Return everything that a step depends on, apart from its arguments and values of tensors."""
        parts = [*self._modules.state().values(), *self.optimizer.state()]
        elbo = self.loss.elbo
        parts += [elbo.num_particles, elbo.vectorize_particles, elbo.estimator, validates(None)]
        parts += [id(stored_parameter(name)) for name in self._stored]
        parts += [(type(each), key_of(vars(each))) for each in handlers_around()]
        for kind in sorted({value.device.type for value in self.optimizer.parameters}):
            parts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        return tuple(parts)


def step_of_fit(
    loss: Loss,
    optimizer: OneOptimizer,
    compiled: Compiled,
    num_steps: int,
    has_checkpoints: bool,
    watches: bool,
) -> EagerStep:
    """Return the step of a fit for its option ``compiled`` and the number of steps to come."""
    if not compiled:
        return EagerStep(loss, optimizer)
    if compiled is True:
        return CompiledStep(loss, optimizer, watches=watches)
    is_exact = compiled == "traced" or has_checkpoints  # a resumed run would compile elsewhere
    own: dict[str, Any] = {"is_exact": is_exact, "num_steps": num_steps}
    return CompiledStep(loss, optimizer, backend=None, fallback=True, watches=watches, **own)
