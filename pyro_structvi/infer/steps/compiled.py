"""The engine that compiles a step for each kind of call."""

import random
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi._checks import shape_text
from pyro_structvi._pyro import stored_parameter
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.ranks import world
from pyro_structvi.infer.steps.call import Call
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.finite import FiniteCheck
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.infer.steps.modules import Same
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.replayed import ReplayedStep
from pyro_structvi.infer.steps.step import Check, Step
from pyro_structvi.infer.steps.subsamples import SubsampleRecorder
from pyro_structvi.infer.steps.traced import explain
from pyro_structvi.infer.terms import ELBOTerms

MANY_KINDS = 16


class CompileFallbackWarning(UserWarning):
    """A step could not be compiled, and runs as ``SVI`` would run it."""


class _NotCompiledError(Exception):
    """A step could not be compiled; the message says why."""


class CompiledStep(Step):
    """Takes the first step of each kind of call eagerly, and replays what it traces in the second.

    Args:
        loss: The loss.
        optimizer: What updates the parameters.
        check: See :class:`Step`.
        backend: A backend of ``torch.compile``, None, or "auto".
        fallback: Whether a step that cannot be compiled is taken eagerly, with a warning.

    Attributes:
        kinds: The steps that have been compiled, by arguments and by the state of model and guide.

    Raises:
        RuntimeError: If the steps are to be shared by several processes.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        check: Check | None = None,
        *,
        backend: str | None = "auto",
        fallback: bool = False,
    ) -> None:
        super().__init__(loss, optimizer, check)
        if isinstance(check, FiniteCheck) and check.is_shared and world()[1] > 1:
            raise RuntimeError(
                f"Compiled steps train in one process, but got {world()[1]}. Take eager steps."
            )
        self._eager = EagerStep(loss, optimizer, self._check_first)
        self._backend, self._fallback = backend, fallback
        self._stored: list[str] = []  # names of what is found in Pyro's store
        self.kinds: dict[Hashable, ReplayedStep] = {}
        self._uncompiled: set[Hashable] = set()  # calls that have fallen back
        self._drawing_in_python: set[Hashable] = set()

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return loss, log likelihood and KL.

        Raises:
            RuntimeError: If the step cannot be compiled; nothing has changed.
        """
        call = Call(args, kwargs)
        if call.key in self._uncompiled:
            return self._eager.take(args, kwargs)
        if self.optimizer.was_loaded():
            self.kinds.clear()
        key = call.key, self._state()
        if key not in self.kinds:
            return self._take_first(call)
        try:
            return self._replay(self.kinds[key], call)
        except _NotCompiledError as error:
            if not self._fallback:
                raise RuntimeError(
                    f"{error} Pass `fallback=True` to go on without."
                ) from error.__cause__
            del self.kinds[key]
            self._fall_back(call, str(error))
        return self._eager.take(args, kwargs)

    def _take_first(self, call: Call) -> list[float]:
        """Take an eager step, which finds parameters and plates."""
        generators = _python_generators()
        with poutine.trace(param_only=True) as capture, SubsampleRecorder() as recorder:
            numbers = self._eager.take(call.args, call.kwargs)
        if _python_generators() != generators:
            self._drawing_in_python.add(call.key)
        self.loss.zero_grad()  # also of what the optimizer does not train
        self._stored = [name for name in capture.trace.nodes if stored_parameter(name) is not None]
        self.optimizer.was_loaded()
        if not self.loss.is_structured:
            self._fall_back(call, f"{type(self.loss.elbo).__name__} cannot be compiled.")
            return numbers
        updates = self._check is None
        step = ReplayedStep(self.loss, self.optimizer, recorder.draws, self._backend, updates)
        self.kinds[call.key, self._state()] = step  # now that the parameters are known
        if len(self.kinds) == MANY_KINDS:
            warnings.warn(
                f"{MANY_KINDS} kinds of steps have been compiled, by shapes, arguments and modes. Pass "
                "numbers that change as tensors, and pad what has many sizes.",
                stacklevel=5,
            )
        return numbers

    def _check_first(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Refuse an optimizer of parameters that this step does not have, then check numbers."""
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

    def _replay(self, step: ReplayedStep, call: Call) -> list[float]:
        if step.is_ready:
            outputs = step(call)
        else:
            with self._explained():
                if call.key in self._drawing_in_python:
                    raise RuntimeError(
                        "a step draws random numbers by Python's `random` or by NumPy, and would repeat "
                        "what it has drawn once; draw them by torch"
                    )
                outputs = step(call)
        numbers, terms = step.unpack(outputs)
        read = self._read((call.args, call.kwargs), numbers, terms)
        if not step.has_updated:
            self.optimizer.step()
        return read

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Leave all as it was where a step cannot be compiled, and say why."""
        try:
            with self._modules.unchanged_on_error(self.optimizer.parameters):
                yield
        except Exception as error:
            raise _NotCompiledError(f"This step cannot be compiled: {explain(error)}.") from error

    def _fall_back(self, call: Call, reason: str) -> None:
        warnings.warn(f"{reason} The step runs uncompiled.", CompileFallbackWarning, stacklevel=5)
        self._uncompiled.add(call.key)

    def _state(self) -> Hashable:
        """Return what decides how model and guide run, besides their arguments."""
        parts = self._modules.state()
        parts += [self.loss.elbo.num_particles, self.loss.elbo.vectorize_particles]
        parts += [Same(stored_parameter(name)) for name in self._stored]
        for kind in sorted({value.device.type for value in self.optimizer.parameters}):
            parts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        return tuple(parts)


def _python_generators() -> list[Any]:
    """Return the states of the random generators that a traced step does not see."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002, that is the one to look at
    return [random.getstate(), of_numpy[2], of_numpy[1].tobytes()]
