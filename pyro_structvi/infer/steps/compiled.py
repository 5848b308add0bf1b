"""Eager training steps, and recorded ones."""

import math
import random
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi._checks import shape_text, warn_user
from pyro_structvi._pyro import ONE_THREAD, stored_parameter
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.steps.modules import Modules, generators_of
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import explain
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Call, Loss, StepTerms, error_of, numbers_of
from pyro_structvi.infer.terms import ELBOTerms

MOST_KINDS = 32


class EagerStep:
    """A step of ``SVI`` with one optimizer; a Pyro optimizer adopts the parameters of each step.

    Args:
        loss: The loss.
        optimizer: The optimizer.

    Attributes:
        notes: Notes on tracing and compilation, with steps and reasons.
    """

    def __init__(self, loss: Loss, optimizer: OneOptimizer) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.notes: list[str] = []
        self._modules = Modules(loss.parts)
        self._numbers = torch.zeros(4)  # of the last eager step, on this rank

    def __call__(self, *args: Any, **kwargs: Any) -> StepTerms:
        """Take a step and count it for the schedule of the KL weight.

        On an error parameters and buffers stay as they were.
        """
        weight = self.loss.elbo.current_kl_weight
        self.optimizer.check_rates()
        try:
            with ONE_THREAD, self._modules.buffers_kept_on_error():
                loss, likelihood, kl, _ = self.take(args, kwargs)
        except Exception:
            self.loss.zero_grad()
            self.optimizer.forget_gradients()
            raise
        finally:
            torch.clear_autocast_cache()  # of the weights before the update
        self.loss.elbo.advance()
        return StepTerms(loss, likelihood, kl, weight)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return the numbers of :func:`numbers_of`."""
        return self.take_eagerly(args, kwargs)

    def take_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step by Python that is not counted; return its numbers."""
        is_pyros = self.optimizer.is_pyros
        with poutine.trace(param_only=True) if is_pyros else nullcontext() as capture:
            loss, terms = self.loss(*args, **kwargs)
            if loss.requires_grad:
                torch.autograd.backward(loss)
        if capture is not None and isinstance(terms, ELBOTerms):
            met = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
            self.optimizer.adopt(dict.fromkeys(met))
        elif isinstance(terms, ELBOTerms):
            self._refuse_other_parameters()
        gradients = [parameter.grad for parameter in self.optimizer.parameters]
        self._numbers = numbers_of(loss, terms, gradients)
        read = self._read((args, kwargs), self._numbers, terms)
        self.optimizer.step()
        return read

    def _read(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Return the numbers of a step, with the gradients set and before the update.

        Raises:
            FloatingPointError: If a term or a gradient is not finite.
            ValueError: If a distribution refused a value that is finite.
        """
        read: list[float] = numbers.tolist()
        if not math.isfinite(sum(read[1:])):
            raise error_of(self.loss, self.optimizer.parameters, batch, terms)
        return read

    def _refuse_other_parameters(self) -> None:
        untouched = [p for p in self.optimizer.parameters if p.requires_grad and p.grad is None]
        own = {id(tensor) for tensor in self._modules.tensors()} if untouched else ()
        foreign = [shape_text(p.shape) for p in untouched if id(p) not in own]
        if foreign:
            raise ValueError(
                f"`optim` must train parameters of model and guide, but {len(foreign)} of its "
                f"parameters, of shapes {foreign[:3]}, belong to neither. Make it of "
                "`guide.parameters()`, and of `model.parameters()` if there are point estimates."
            )


class CompileFallbackWarning(UserWarning):
    """A step cannot be compiled and runs as in ``SVI``."""


class NotCompiledError(Exception):
    """A step cannot be compiled; the message is the reason."""


class _UndoneError(Exception):
    """A step must be undone."""


class CompiledStep(EagerStep):
    """Records the second step of each kind of call, and replays it from the fourth step on.

    The second and the third step are eager ones, compared with the record and with its replay. A record
    is not used if it gives another loss or draws other random numbers.

    Args:
        loss: The loss.
        optimizer: The optimizer.
        backend: A backend of ``torch.compile``, None, or "auto".
        fallback: Whether a step that cannot be compiled is taken eagerly, with a warning.
        watches: Whether other code may change model and guide between steps.
        is_exact: Whether a record must have Python's numbers bit for bit instead of up to rounding.

    Attributes:
        kinds: The recorded steps, by arguments, the state of model and guide, and a number for those
            that differ in the values that Python reads.
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
    ) -> None:
        super().__init__(loss, optimizer)
        self._backend, self._fallback = backend, fallback
        self._watches, self._is_exact = watches, is_exact
        self._last_state: Hashable = None
        self._has_replayed = False  # whether the last step ran no Python but this package's
        self._stored: list[str] = []  # names of parameters in Pyro's store
        self.kinds: dict[Hashable, ReplayedStep] = {}
        self._uncompiled: set[Hashable] = set()  # calls that have fallen back
        self._reasons: set[str] = set()  # why

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers.

        Raises:
            RuntimeError: If the step cannot be compiled; nothing has changed.
            TypeError: If an argument is neither a tensor nor hashable.
        """
        return self.take_call(Call(args, kwargs))

    def take_call(self, call: Call) -> list[float]:
        """Take a step with arguments that can be compared."""
        if call.key in self._uncompiled:
            return self.take_eagerly(call.args, call.kwargs)
        step = self.kind_of(call)
        if step is None:
            return self._take_first(call)
        try:
            return self.replay(step, call)
        except NotCompiledError as error:
            if not self._fallback:
                raise RuntimeError(
                    f"{error} Pass `fallback=True` to go on without."
                ) from error.__cause__
            self._fall_back(call, str(error))
        return self.take_eagerly(call.args, call.kwargs)

    def kind_of(self, call: Call) -> ReplayedStep | None:
        """Return the recorded step for a call, or None if it is the first call of its kind."""
        if self._watches or not self._has_replayed:
            self._last_state = self._state()
        self._has_replayed = False
        for number in count():
            step = self.kinds.get((call.key, self._last_state, number))
            if step is None or step.holds(call):
                break
        return step

    def _take_first(self, call: Call) -> list[float]:
        """Take the first step of a kind eagerly, and find the parameters."""
        if len(self.kinds) == MOST_KINDS:
            self._fall_back(
                call,
                f"There are more than {MOST_KINDS} kinds of steps, by shapes, arguments, modes and "
                "values that Python reads. Pass numbers that change as tensors, and pad what has many "
                "sizes.",
            )
            return self.take_eagerly(call.args, call.kwargs)
        generators = _python_generators()
        with poutine.trace(param_only=True) as capture:
            numbers = self.take_eagerly(call.args, call.kwargs)
        self.loss.zero_grad()  # also of parameters that the optimizer does not train
        self._stored = [name for name in capture.trace.nodes if stored_parameter(name) is not None]
        step = ReplayedStep(self.loss, self.optimizer, self._backend)
        step.keeps = [
            *self._modules.parts(),
            self.optimizer.groups,
            *map(stored_parameter, self._stored),
        ]
        if _python_generators() != generators:
            step.refusal = (
                "it draws random numbers by Python's `random` or by NumPy, and would repeat what it "
                "has drawn once; draw them by torch"
            )
        state = self._state()  # now that the parameters are known
        keys = ((call.key, state, number) for number in count())
        self.kinds[next(key for key in keys if key not in self.kinds)] = step
        return numbers

    def replay(self, step: ReplayedStep, call: Call) -> list[float]:
        """Replay a step of a known kind, or record it and compare that with Python's step.

        Raises:
            NotCompiledError: If that is not possible; nothing has changed.
        """
        if step.refusal:
            raise NotCompiledError(f"This step cannot be compiled: {step.refusal}.")
        if step.to_compare:
            return self._take_compared(step, call)
        if step.is_ready:
            outputs = step(call)
            self._has_replayed = step.updates
        else:
            with self._explained(step):
                outputs = step(call)
        batch = call.args, call.kwargs
        if not step.updates:
            read = self._read(batch, *step.unpack(outputs))
            self.optimizer.step()
            return read
        read = outputs[0].tolist()
        if not math.isfinite(sum(read)):
            read = self._read(batch, *step.unpack(outputs))
            self.optimizer.forget_gradients()  # set for the error of the check
        return read

    def _take_compared(self, step: ReplayedStep, call: Call) -> list[float]:
        """Record or replay a step, undo it, take it by Python, and compare the two."""
        generators, recorded = generators_of(self.optimizer.parameters), list[Any]()
        with suppress(_UndoneError), self._explained(step):
            with self._modules.plain_changes() as changed:
                outputs = step(call)
            if changed:
                raise RuntimeError(not_repeated(changed))
            recorded = [outputs[0].clone(), *(each.get_state() for each in generators)]
            raise _UndoneError
        self.optimizer.forget_gradients()
        start = time.perf_counter()
        read = self.take_eagerly(call.args, call.kwargs)
        step.eager_seconds = min(step.eager_seconds, time.perf_counter() - start)
        self.loss.zero_grad()  # also of parameters that the optimizer does not train
        own = self._numbers
        eps = torch.finfo(own.dtype).eps
        change = (own - recorded[0])[:3].abs().max() / own[:3].abs().max().clamp(min=eps)
        step.difference, step.to_compare = float(change), step.to_compare - 1
        is_same = torch.equal(own, recorded[0]) if self._is_exact else change <= math.sqrt(eps)
        if not all(map(torch.equal, recorded[1:], (each.get_state() for each in generators))):
            step.refusal = "traced, it draws other random numbers than by Python"
        elif not is_same:
            step.refusal = (
                f"traced, its numbers differ from Python's, the loss by {change:.1g} of it"
            )
        return read

    @contextmanager
    def _explained(self, step: ReplayedStep) -> Iterator[None]:
        """Undo a step that cannot be compiled, and raise the reason."""
        trained = self.optimizer.unchanged_on_error() if step.updates else nullcontext()
        try:
            with trained, self._modules.unchanged_on_error(self.optimizer.parameters):
                yield
        except _UndoneError:
            raise
        except Exception as error:
            self.optimizer.forget_gradients()
            step.refusal = explain(error)
            raise NotCompiledError(f"This step cannot be compiled: {step.refusal}.") from error

    def _fall_back(self, call: Call, reason: str) -> None:
        """Take steps with such arguments eagerly from now on, and say each reason once."""
        self._uncompiled.add(call.key)
        if reason not in self._reasons:
            self._reasons.add(reason)
            self._say(reason)

    def _say(self, reason: str) -> None:
        warn_user(f"{reason} The step runs uncompiled.", CompileFallbackWarning)

    def _state(self) -> Hashable:
        """Return everything that a step depends on, apart from its arguments and values of tensors."""
        parts = [*self._modules.state(), *self.optimizer.state()]
        parts += [self.loss.elbo.num_particles, self.loss.elbo.vectorize_particles]
        parts += [id(stored_parameter(name)) for name in self._stored]
        for kind in sorted({value.device.type for value in self.optimizer.parameters}):
            parts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        return tuple(parts)


def not_repeated(changed: Sequence[str]) -> str:
    """Return the reason why a step that changes these values cannot be replayed."""
    return (
        f"a step changes {', '.join(changed[:3])}, which a replay would not; keep what changes in a "
        "buffer, and change it in place"
    )


def _python_generators() -> list[Any]:
    """Return the states of the random generators that are invisible to a record."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002, that is the one to look at
    return [random.getstate(), of_numpy[2], of_numpy[1].tobytes()]
