"""Replayed training steps, on a CPU or by CUDA graphs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import pyro
import torch
from torch import Tensor

from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import Outputs, Record
from pyro_structvi.infer.steps.step import Call, Loss, numbers_of
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.linalg.matrices import rows_in_one

GRAPH_DEVICE = "cuda"


class CUDAGraph:
    """A function of tensors, captured once and replayed with other values.

    Args:
        function: A function from tensors to tensors.
        inputs: Tensors of the shapes of all later calls.

    Raises:
        RuntimeError: If an operation cannot be captured.
    """

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Outputs], inputs: Sequence[Tensor]
    ) -> None:
        self._inputs = [value.detach().clone() for value in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # of this device; torch's own is of the first that captured
        with (
            _usable_after_a_failed_capture(),
            torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self._outputs = function(self._inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Replay with these inputs; the next call overwrites the results."""
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._outputs


class ReplayedStep:
    """A step of loss, gradients and update without the Python of model and guide.

    The first call is recorded. Later calls replay the record: on the CPU operation by operation or
    compiled, on a GPU as a CUDA graph once the record has been compared. Where the optimizer can skip an
    update on the device, which it does unless all is finite, the update is recorded, too.

    Args:
        loss: The loss, after one eager step.
        optimizer: The optimizer.
        backend: A backend of ``torch.compile``, None, or "auto".

    Attributes:
        updates: Whether each call updates the parameters, too.
        keeps: Objects that must stay alive with this step.
        difference: Relative difference of the replayed loss and Python's.
        to_compare: How many steps are still to be compared with Python's.
        refusal: Why the record must not be replayed, or "".
        eager_seconds: The shortest duration of Python's step.

    Raises:
        RuntimeError: In a call, if it cannot be recorded, compiled or captured.
    """

    keeps: Sequence[object] = ()
    difference = 0.0
    to_compare = 2  # the record and a replay
    refusal = ""
    eager_seconds = math.inf

    def __init__(self, loss: Loss, optimizer: OneOptimizer, backend: str | None) -> None:
        self._loss, self._optimizer = loss, optimizer
        self._parameters = [p for p in optimizer.parameters if p.requires_grad]
        self._device = self._parameters[0].device
        self._captures = self._device.type == GRAPH_DEVICE
        self.updates = optimizer.can_skip and not optimizer.runs_hooks
        self._is_auto, self._is_compiled = backend == "auto", False
        usual = None if self._captures else "inductor"
        self._backend = usual if self._is_auto else backend
        dtype = torch.promote_types(torch.float32, self._parameters[0].dtype)
        self._kl_weight = torch.zeros((), dtype=dtype, device=self._device)
        self._record: Record | None = None
        self._update_record: Record | None = None
        self._graph: CUDAGraph | None = None
        self._sites: tuple[list[str], list[str]] = [], []

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to compare, compile or capture."""
        is_compiled = self._is_compiled == (self._backend is not None)
        is_captured = self._graph is not None or not self._captures
        return not self.to_compare and is_compiled and is_captured

    @property
    def num_operations(self) -> int:
        """The number of recorded operations of loss and gradients."""
        return 0 if self._record is None else len(self._record)

    def holds(self, call: Call) -> bool:
        """Whether Python would read the same values as in the record."""
        return self._record is None or self._record.holds([self._kl_weight, *call.tensors])

    def __call__(self, call: Call) -> Outputs:
        """Return the numbers, the terms and the gradients of a step, and update if that is recorded."""
        self._kl_weight.fill_(self._loss.elbo.current_kl_weight)
        self._optimizer.read_rates()
        inputs = [self._kl_weight, *call.tensors]
        with torch.cuda.device_of(self._kl_weight):
            if self._record is None:
                return self._make_records(call, inputs)
            if self._backend is not None and not self._is_compiled:
                self._compile(self._record, self._backend, inputs)
            if not self._captures:
                return self._replay(inputs)
            if self.to_compare:
                return self._warm_up(inputs)
            if self._graph is None:
                self._graph = CUDAGraph(self._replay, inputs)
            return self._graph(inputs)

    def compile(self, backend: str) -> None:
        """Let the next call compile the record, and have it compared with Python's step.

        Args:
            backend: A backend of ``torch.compile``.
        """
        self._backend, self.to_compare = backend, 1

    def interpret(self) -> None:
        """Run the operations one by one again."""
        assert self._record is not None
        self._record.interpret()
        self._backend, self._is_compiled, self.to_compare, self.refusal = None, False, 0, ""

    def unpack(self, outputs: Outputs) -> tuple[Tensor, ELBOTerms]:
        """Set the gradients of the parameters; return the numbers and the terms."""
        self._set_gradients(outputs)
        values = iter(outputs[1:])
        likelihood, kl = (dict(zip(names, values, strict=False)) for names in self._sites)
        return outputs[0], ELBOTerms(likelihood, kl)

    # ---- records ---------------------------------------------------------------------------------

    def _make_records(self, call: Call, inputs: list[Tensor]) -> Outputs:
        elsewhere = [value for value in call.tensors if value.device != self._device]
        if elsewhere:
            raise RuntimeError(
                f"The parameters are on {self._device}, but an argument is on {elsewhere[0].device}. "
                "Move it there before the step."
            )
        record = Record(lambda *given: self._differentiate(call, given), inputs)
        outputs, record.outputs = record.outputs, ()
        self._record = record
        if self._is_auto and not record.can_be_compiled:
            self._backend = None
        if self.updates:
            names = self._optimizer.state_names
            with self._optimizer.tensor_rates(self._device):
                self._update_record = Record(self._update, self._laid_out(outputs))
            if self._optimizer.state_names != names:
                raise RuntimeError("the optimizer makes its state in this step, not in the first")
        return outputs

    def _differentiate(self, call: Call, tensors: Sequence[Tensor]) -> Outputs:
        """Return the numbers, the term of each site, and the gradient of each parameter."""
        kl_weight, *given = tensors
        args, kwargs = call.with_tensors(given)
        blocks = nullcontext() if self._backend is None else rows_in_one()
        with pyro.validation_enabled(False), blocks:
            terms: ELBOTerms = self._loss.elbo.terms(*self._loss.parts, *args, **kwargs)
        loss = -terms.weighted(kl_weight)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(self._parameters, gradients, strict=True)
        used = {parameter: gradient for parameter, gradient in pairs if gradient is not None}
        self._parameters, self._sites = [*used], ([*terms.log_likelihood], [*terms.kl])
        values = (*terms.log_likelihood.values(), *terms.kl.values())
        numbers = numbers_of(loss, terms, used.values())
        return numbers, *(value.detach() for value in values), *used.values()

    def _update(self, *outputs: Tensor) -> Outputs:
        """Update the parameters by the gradients of a step, unless one of its numbers is not finite."""
        self._set_gradients(outputs)
        self._optimizer.step(skip=(~outputs[0][1:].sum().isfinite()).to(torch.float32))
        return ()

    def _set_gradients(self, outputs: Outputs) -> None:
        gradients = outputs[len(outputs) - len(self._parameters) :]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = _laid_out_as(gradient, parameter)

    def _laid_out(self, outputs: Outputs) -> list[Tensor]:
        """Return the numbers and the gradients of a step, in the layouts of their parameters."""
        gradients = outputs[len(outputs) - len(self._parameters) :]
        return [outputs[0], *map(_laid_out_as, gradients, self._parameters)]

    # ---- replays ---------------------------------------------------------------------------------

    def _compile(self, record: Record, backend: str, inputs: list[Tensor]) -> None:
        record.compile(backend, inputs)
        self._is_compiled = True

    def _replay(self, inputs: Sequence[Tensor]) -> Outputs:
        assert self._record is not None
        outputs = self._record(inputs)
        if self._update_record is not None:
            self._update_record(self._laid_out(outputs))
        return outputs

    def _warm_up(self, inputs: Sequence[Tensor]) -> Outputs:
        """Replay on a separate stream, as a capture will."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = self._replay(inputs)
        current.wait_stream(side)
        return outputs


@contextmanager
def _usable_after_a_failed_capture() -> Iterator[None]:
    """Restore the current stream and the random generator of the device if a capture raises."""
    # torch leaves the stream of the capture current, and a generator that refuses to draw.
    stream = torch.cuda.current_stream()
    generator = torch.cuda.default_generators[stream.device_index]
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(before)
        raise


def _laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient in its parameter's layout, which fused optimizers take for granted."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
