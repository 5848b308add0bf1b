"""Replayed training steps, on a CPU or by CUDA graphs."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import Outputs, Record
from pyro_structvi.infer.steps.step import Call, Loss, SubsamplePlayer, numbers_of
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.linalg.matrices import rows_in_one


class CUDAGraph:
    """A function of tensors, captured once and replayed with other values.

    Args:
        function: A function from tensors to tensors.
        inputs: Tensors of the shapes of all later calls.
    """

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Outputs], inputs: Sequence[Tensor]
    ) -> None:
        self._inputs = [value.detach().clone() for value in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # of this device; torch's own is of the first that captured
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Replay with these inputs; the next call overwrites the results."""
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._outputs


GRAPH_DEVICE = "cuda"
WARM_UP = 3  # replays before a CUDA graph is captured, as torch advises


class ReplayedStep:
    """A step of loss, gradients and update without the Python of model and guide.

    The first call is recorded. Later calls replay the record: on the CPU operation by operation or
    compiled, on a GPU as a CUDA graph that is captured after a few calls.

    Args:
        loss: The loss, after one eager step.
        optimizer: The optimizer.
        draws: How the plates draw their subsamples.
        backend: A backend of ``torch.compile``, None, or "auto".
        updates: Whether the update is recorded, too.
        checks: Whether the norm of the gradients is computed, and an update skipped unless it is finite.

    Attributes:
        keeps: Objects that must stay alive with this step.
        difference: Relative difference of the replayed loss and Python's.
        to_compare: How many steps are still to be compared with Python's.
        refusal: Why the record must not be replayed, or "".

    Raises:
        RuntimeError: In a call, if it cannot be recorded, compiled or captured.
    """

    keeps: Sequence[object] = ()
    difference = 0.0
    to_compare = 2  # the record and a replay
    refusal: str = ""

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        draws: Sequence[Callable[[], Tensor]],
        backend: str | None,
        updates: bool,
        checks: bool,
    ) -> None:
        self._loss, self._optimizer, self._checks = loss, optimizer, checks
        self._parameters = [p for p in optimizer.parameters if p.requires_grad]
        self._device = self._parameters[0].device
        self._captures = self._device.type == GRAPH_DEVICE
        self._updates = updates and (self._captures or optimizer.can_skip)
        self._draws = draws if self._captures else []  # a CUDA graph cannot draw on the host
        usual = None if self._captures else "inductor"
        self._is_auto = backend == "auto"
        self._backend = usual if self._is_auto else backend
        self._is_compiled = False
        dtype = torch.promote_types(torch.float32, self._parameters[0].dtype)
        self._kl_weight = torch.zeros((), dtype=dtype, device=self._device)
        self._record: Record | None = None
        self._update_record: Record | None = None
        self._is_given: list[bool] = []  # which of the outputs are not None
        self._graph: CUDAGraph | None = None
        self._options: list[dict[str, Any]] = []  # of the optimizer, at its record
        self._sites: tuple[list[str], list[str]] = [], []
        self._replays = 0

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to compare, compile or capture."""
        if self._captures:
            return self._graph is not None
        has_update = self._update_record is not None or not self._updates
        is_compiled = self._is_compiled == (self._backend is not None)
        return not self.to_compare and has_update and is_compiled

    def notice_options(self) -> None:
        """Let the next call record or capture the update anew if the optimizer's options changed."""
        if self._updates and self._options != (options := self._optimizer.options):
            self._graph, self._update_record, self._options = None, None, options

    def holds(self, call: Call) -> bool:
        """Whether Python would read the same values as in the record."""
        subsamples = [self._kl_weight] * len(self._draws)  # drawn by each step, so never read
        given = [self._kl_weight, *subsamples, *call.tensors]
        return self._record is None or self._record.holds(given)

    @property
    def num_operations(self) -> int:
        """The number of recorded operations."""
        return 0 if self._record is None else len(self._record)

    @property
    def replays_update(self) -> bool:
        """Whether each call updates the parameters, too, by recorded operations."""
        return self._updates and not self._captures

    @property
    def has_updated(self) -> bool:
        """Whether the last call has updated the parameters, too."""
        return self.replays_update or (self._updates and self._graph is not None)

    def __call__(self, call: Call) -> Outputs:
        """Return the numbers, the terms and the gradients of a step, and update if that is recorded."""
        self._kl_weight.fill_(self._loss.elbo.current_kl_weight)
        subsamples = [draw().to(self._device) for draw in self._draws]
        if self._updates:
            self._optimizer.read_rates()
        with torch.cuda.device_of(self._kl_weight):
            inputs = [self._kl_weight, *subsamples, *call.tensors]
            if self._record is None:
                outputs = self._make_record(call, inputs)
            elif self._captures:
                outputs = self._replay_on_gpu(self._record, inputs)
            else:
                outputs = self._replay(self._record, inputs)
        return outputs

    def compile(self, backend: str) -> None:
        """Let the next call compile the record.

        Args:
            backend: A backend of ``torch.compile``.
        """
        self._backend = backend

    def interpret(self) -> None:
        """Run the operations one by one again."""
        assert self._record is not None
        self._record.interpret()
        self._backend, self._is_compiled = None, False

    def unpack(self, outputs: Outputs) -> tuple[Tensor, ELBOTerms]:
        """Set the gradients of the parameters; return the numbers and the terms."""
        self._set_gradients(outputs)
        numbers, *values = (value for value in outputs if value is not None)
        values_of = iter(values)
        likelihood, kl = (dict(zip(names, values_of, strict=False)) for names in self._sites)
        return numbers, ELBOTerms(likelihood, kl)

    def _make_record(self, call: Call, inputs: list[Tensor]) -> Outputs:
        elsewhere = [value for value in call.tensors if value.device != self._device]
        if elsewhere:
            raise RuntimeError(
                f"The parameters are on {self._device}, but an argument is on {elsewhere[0].device}. "
                "Move it there before the step."
            )
        record = Record(lambda *given: self._differentiate(call, given), inputs)
        outputs, record.outputs = record.outputs, ()
        if self._captures and self._backend is not None:
            record.compile(self._backend, inputs)
        self._record = record
        self._is_given = [value is not None for value in outputs]
        if self.replays_update:
            self._run_update(outputs)
        return outputs

    def _replay(self, record: Record, inputs: list[Tensor]) -> Outputs:
        if self._is_auto and not record.can_be_compiled:
            self._backend = None
        if self._backend is not None and not self._is_compiled:
            record.compile(self._backend, inputs)
            self._is_compiled = True
        outputs = record(inputs)
        if self.replays_update:
            self._run_update(outputs)
        return outputs

    def _run_update(self, outputs: Outputs) -> None:
        own = [*map(_laid_out_as, outputs[-len(self._parameters) :], self._parameters)]
        inputs = [v for v in (*outputs[: -len(own)], *own) if v is not None]
        if self._update_record is not None:
            self._update_record(inputs)
            return

        def update(*tensors: Tensor) -> Outputs:
            given = iter(tensors)
            self._update([next(given) if is_given else None for is_given in self._is_given])
            return ()

        names = self._optimizer.state_names
        with self._optimizer.tensor_rates(self._device, captures=False):
            record = Record(update, inputs)
        if self._optimizer.state_names != names:
            raise RuntimeError("the optimizer makes its state in this step, not in the first")
        self._update_record = record

    def _replay_on_gpu(self, record: Record, inputs: list[Tensor]) -> Outputs:
        self._replays += 1
        if self._replays <= WARM_UP:
            return self._warm_up(record, inputs)
        if self._graph is None:
            self._graph = self._capture(record, inputs)
        return self._graph(inputs)

    def _warm_up(self, record: Record, inputs: Sequence[Tensor]) -> Outputs:
        """Run on a separate stream, as a capture will."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = record(inputs)
        current.wait_stream(side)
        return outputs

    def _capture(self, record: Record, inputs: list[Tensor]) -> CUDAGraph:
        if not self._updates:
            return CUDAGraph(record, inputs)

        def step(tensors: Sequence[Tensor]) -> Outputs:
            outputs = record(tensors)
            self._update(outputs)
            return outputs if self._checks else outputs[: -len(self._parameters)]

        with self._optimizer.tensor_rates(self._device, captures=True):
            return CUDAGraph(step, inputs)

    def _differentiate(self, call: Call, tensors: Sequence[Tensor]) -> Outputs:
        """Return the numbers, the term of each site, and the gradient of each parameter."""
        kl_weight, *given = tensors
        subsamples, given = given[: len(self._draws)], given[len(self._draws) :]
        args, kwargs = call.with_tensors(given)
        blocks = nullcontext() if self._backend is None else rows_in_one()
        with pyro.validation_enabled(False), SubsamplePlayer(subsamples), blocks:
            terms = self._loss.terms(*args, **kwargs)
        loss = -terms.weighted(kl_weight)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        self._sites = [*terms.log_likelihood], [*terms.kl]
        values = (*terms.log_likelihood.values(), *terms.kl.values())
        numbers = numbers_of(loss, terms, gradients if self._checks else ())
        return numbers, *(value.detach() for value in values), *gradients

    def _set_gradients(self, outputs: Sequence[Tensor | None]) -> None:
        gradients = outputs[-len(self._parameters) :]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = _laid_out_as(gradient, parameter)

    def _update(self, outputs: Sequence[Tensor | None]) -> None:
        """Update the parameters with the gradients of a step."""
        self._set_gradients(outputs)
        numbers = outputs[0]
        if not self._checks or numbers is None:
            self._optimizer.step()
        else:
            parts = numbers[1:]  # `fit` checks their sum, too
            self._optimizer.step(skip=(~parts.sum().isfinite()).to(torch.float32))


def _laid_out_as(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return a gradient in its parameter's layout, which fused optimizers take for granted."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
