"""Eager training steps, and recorded ones."""

import math
import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from typing import Any

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
    """A step of ``SVI`` with one optimizer; a Pyro optimizer adopts the parameters of each step."""

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
    """A step cannot be compiled and runs as in ``SVI``."""


class NotCompiledError(Exception):
    """A step cannot be compiled; the message is the reason."""


class _UndoneError(Exception):
    """A step must be undone."""


class CompiledStep(Step):
    """Records the second step of each kind of call, and replays it from the fourth step on.

    The second and the third step are eager ones, compared with the record and with its replay. A record
    is not used if it gives another loss or draws other random numbers.

    Args:
        loss: The loss.
        optimizer: The optimizer.
        check: See :class:`Step`.
        backend: A backend of ``torch.compile``, None, or "auto".
        fallback: Whether a step that cannot be compiled is taken eagerly, with a warning.
        watches: Whether other code may change model and guide between steps.
        is_exact: Whether a record must have Python's numbers bit for bit instead of up to rounding.

    Attributes:
        eager: The engine of eager steps.
        kinds: The recorded steps, by arguments, the state of model and guide, and a number for those
            that differ in the values that Python reads.
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
        self._stored: list[str] = []  # names of parameters in Pyro's store
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
        """Return the recorded step for a call, or None if it is the first call of its kind."""
        if self.optimizer.was_loaded():
            self.kinds.clear()
        if self._watches or not self._has_replayed:
            self._last_state = self._state()
        self._has_replayed = False
        for number in count():
            step = self.kinds.get((call.key, self._last_state, number))
            if step is None or step.holds(call):
                break
        return step

    def take_first(self, call: Call) -> list[float]:
        """Take the first step of a kind eagerly, and find parameters and plates."""
        generators = _python_generators()
        with poutine.trace(param_only=True) as capture, SubsampleRecorder() as recorder:
            numbers = self.eager.take(call.args, call.kwargs)
        if _python_generators() != generators:
            self._drawing_in_python.add(call.key)
        self.loss.zero_grad()  # also of parameters that the optimizer does not train
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
        state = self._state()  # now that the parameters are known
        keys = ((call.key, state, number) for number in count())
        self.kinds[next(key for key in keys if key not in self.kinds)] = step
        if len(self.kinds) == MANY_KINDS:
            warn_user(
                f"{MANY_KINDS} kinds of steps have been compiled, by shapes, arguments, modes and "
                "values that Python reads. Pass numbers that change as tensors, and pad what has many "
                "sizes.",
                UserWarning,
            )
        return numbers

    def _check_first(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Refuse an optimizer of other parameters, then check the numbers."""
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
        """Replay a step of a known kind, or record it and compare that with Python's step.

        Raises:
            NotCompiledError: If that is not possible; nothing has changed.
        """
        if step.refusal:
            raise NotCompiledError(f"This step cannot be compiled: {step.refusal}.")
        step.notice_options()
        if step.to_compare:
            return self._take_compared(step, call)
        if step.is_ready:
            outputs = step(call)
            self._has_replayed = step.has_updated
        else:
            with self._explained(step):
                outputs = step(call)
        batch = call.args, call.kwargs
        if not step.has_updated:
            return self._update(batch, *step.unpack(outputs))
        numbers = outputs[0]
        assert numbers is not None
        read: list[float] = numbers.tolist()
        if self._check is None or math.isfinite(sum(read)):
            return read
        read = self._read(batch, *step.unpack(outputs))
        self.optimizer.forget_gradients()  # set for the error of the check
        return read

    def _take_compared(self, step: ReplayedStep, call: Call) -> list[float]:
        """Record or replay a step, undo it, take it by Python, and compare the two."""
        if call.key in self._drawing_in_python:
            raise NotCompiledError(
                "This step cannot be compiled: it draws random numbers by Python's `random` or by "
                "NumPy, and would repeat what it has drawn once; draw them by torch."
            )
        generators, recorded = generators_of(self.optimizer.parameters), list[Any]()
        with suppress(_UndoneError), self._explained(step):
            recorded = [self._prepare(step, call)[0], *(each.get_state() for each in generators)]
            raise _UndoneError
        self.optimizer.forget_gradients()
        read = self.eager.take(call.args, call.kwargs)
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

    def _prepare(self, step: ReplayedStep, call: Call) -> Outputs:
        """Take a step, and raise if Python changes what a replay would not."""
        with self._modules.plain_changes() as changed:
            outputs = step(call)
        if changed:
            raise RuntimeError(not_repeated(changed))
        return outputs

    @contextmanager
    def _explained(self, step: ReplayedStep) -> Iterator[None]:
        """Undo a step that cannot be compiled, and raise the reason."""
        trained = self.optimizer.unchanged_on_error() if step.replays_update else nullcontext()
        try:
            with trained, self._modules.unchanged_on_error(self.optimizer.parameters):
                yield
        except _UndoneError:
            raise
        except Exception as error:
            self.optimizer.forget_gradients()
            raise NotCompiledError(f"This step cannot be compiled: {explain(error)}.") from error

    def _fall_back(self, call: Call, reason: str) -> None:
        warn_user(f"{reason} The step runs uncompiled.", CompileFallbackWarning)
        self._uncompiled.add(call.key)

    def _state(self) -> Hashable:
        """Return everything that a step depends on, apart from its arguments and values of tensors."""
        parts = self._modules.state()
        parts += [self.loss.elbo.num_particles, self.loss.elbo.vectorize_particles]
        parts.append(self.optimizer.runs_hooks)
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
