"""Replayed training steps, on a CPU or by CUDA graphs."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_structvi._checks import LATER, brief, validates
from pyro_structvi._torch import has_gradient_hook, put_together, take_apart
from pyro_structvi.infer.steps.eager import Loss, numbers_of
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import Outputs, Record, explained
from pyro_structvi.linalg.matrices import rows_in_one

GRAPH_DEVICE = "cuda"


class Call:
    """The arguments of one call, with tensors separated from the structure that holds them.

    Calls with equal ``key`` can share one compiled step; ``step`` is that of its kind, if it is known.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._leaves, self._structure = take_apart((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.key = (self._structure, *map(_kind_of, self._leaves))
        self.step: ReplayedStep | None = None

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = put_together(leaves, self._structure)
        return args, kwargs


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)
    kind: Any = type(leaf)
    is_value = leaf is None or callable(leaf)
    with suppress(TypeError):
        hash(leaf)  # also of its parts
        is_value = is_value or kind.__hash__ is not object.__hash__
    if not is_value:
        raise TypeError(
            f"The arguments of a compiled step must be tensors or hashable, but got {brief(leaf)}. "
            "Pass arrays as tensors, and objects by their parts."
        )
    return kind, leaf


class ReplayedStep:
    """A step of loss, gradients and update without the Python of model and guide.

    The first call is recorded. Later calls replay the record: on the CPU operation by operation or
    compiled, on a GPU as a CUDA graph once the record has been compared. Where the optimizer can skip an
    update on the device, which it does unless all is finite, the update is recorded, too.

    ``others_step`` says whether other code may use gradients between steps, of what this does not train.

    Attributes:
        to_come: How the next steps of this kind are taken, by step and call, before steps are replayed.
        updates: Whether a call updates the parameters; otherwise it sets their gradients.
        generators: The random generators of the host and of the parameters' devices.
        taken: The number of steps of this kind.
        eager_seconds: The shortest duration of Python's; ``seconds`` is that of replays.
        is_compiled: Whether :meth:`compile` has compiled the record.
    """

    taken = 1
    is_compiled = False
    eager_seconds = seconds = math.inf

    def __init__(
        self, loss: Loss, optimizer: OneOptimizer, backend: str | None, others_step: bool
    ) -> None:
        self._loss, self._optimizer, self._others_step = loss, optimizer, others_step
        self.to_come: list[Callable[[ReplayedStep, Call], list[float]]] = []
        self._parameters = [p for p in optimizer.parameters if p.requires_grad]
        self.device = self._parameters[0].device
        self._captures = self.device.type == GRAPH_DEVICE
        self._backend = None if self._captures and backend == "auto" else backend
        self.updates = optimizer.can_be_recorded
        indices = {value.device.index for value in self._parameters if value.is_cuda}
        own = [torch.cuda.default_generators[index] for index in indices]
        self.generators = [torch.default_generator, *own]
        dtype = torch.promote_types(torch.float32, self._parameters[0].dtype)
        self._kl_weight = torch.zeros((), dtype=dtype, device=self.device)
        # Fused optimizers read single precision on a GPU, and any on a CPU.
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        self._rates = [torch.zeros((), dtype=dtype, device=self.device) for _ in optimizer.groups]
        self._records: list[Record] = []  # of loss and gradients, and of the update
        self._graph: CUDAGraph | None = None

    @property
    def num_operations(self) -> int:
        """The number of recorded operations of loss and gradients."""
        return len(self._records[0].operations)

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that loss and gradients change."""
        return self._records[0].written

    @property
    def written(self) -> list[Tensor]:
        """The tensors that a replay changes, such as parameters and the optimizer's state."""
        return [tensor for record in self._records for tensor in record.written]

    def holds(self, call: Call) -> bool:
        """Whether Python would read the same values as in the record."""
        return not self._records or self._records[0].holds([self._kl_weight, *call.tensors])

    def __call__(self, call: Call, undo: list[Callable[[], None]] | None = None) -> Tensor:
        """Record or replay a step; return its numbers, and add to ``undo`` as :class:`Record` does."""
        self._kl_weight.fill_(self._loss.elbo.current_kl_weight)
        for rate, group in zip(self._rates, self._optimizer.groups, strict=True):
            rate.fill_(group["lr"])
        inputs = [self._kl_weight, *call.tensors]
        with torch.cuda.device_of(self._kl_weight):
            if not self._records:
                outputs = self._make_records(call, inputs, undo)
            elif not self._captures:
                outputs = self._replay(inputs)
            elif undo is not None:  # as a capture will be, which is compared before
                outputs = self._warm_up(inputs)
            else:
                if self._graph is None:
                    with explained():
                        self._graph = CUDAGraph(self._replay, inputs)
                outputs = self._graph(inputs)
        if not self.updates:
            self._set_gradients(outputs[1:])
        return outputs[0]

    def compile(self, backend: str, call: Call) -> None:
        """Compile the record of loss and gradients for such calls."""
        self._records[0].compile(backend, [self._kl_weight, *call.tensors])
        self.is_compiled = True

    def interpret(self) -> None:
        """Run the operations one by one again."""
        self._records[0].interpret()
        self.is_compiled = False

    # ---- records ---------------------------------------------------------------------------------

    def _make_records(
        self, call: Call, inputs: list[Tensor], undo: list[Callable[[], None]] | None
    ) -> Outputs:
        elsewhere = [value for value in call.tensors if value.device != self.device]
        if elsewhere:
            raise RuntimeError(
                f"The parameters are on {self.device}, but an argument is on {elsewhere[0].device}. "
                "Move it there before the step."
            )
        if any(map(has_gradient_hook, self._parameters)):
            raise RuntimeError(
                "a parameter has a hook for its `.grad`, which a replay would leave out"
            )
        records = [Record(partial(self._differentiate, call), inputs, undo)]
        if self._others_step:
            own = {id(value) for value in (*self._optimizer.parameters, *self._loss.parameters())}
            others = [*call.tensors, *(each for each in records[0].found if id(each) not in own)]
            if any(value.requires_grad for value in others):
                raise RuntimeError(
                    "an argument, or a tensor outside of model and guide, takes a gradient, which a "
                    "replay would leave out; freeze or detach it, or make it a part of the model"
                )
        outputs = self._laid_out(records[0].outputs)
        if self.updates:
            known = self._optimizer.state()
            records.append(Record(self._update, outputs, undo))
            if self._optimizer.state() != known:
                raise RuntimeError("the optimizer makes its state in this step, not in the first")
        if self._backend is not None:
            records[0].compile(self._backend, inputs)
        for record in records:
            record.outputs = ()
        # At last: a record that an interrupt leaves without an update trains nothing.
        self._records = records
        return outputs

    def _differentiate(self, call: Call, kl_weight: Tensor, *tensors: Tensor) -> Outputs:
        """Return the numbers of a step and the gradient of each parameter that has one."""
        args, kwargs = call.with_tensors(tensors)
        blocks = nullcontext() if self._backend is None else rows_in_one()
        with pyro.validation_enabled(LATER if validates(None) else False), blocks:
            terms = self._loss.terms(*args, **kwargs)
        loss = -terms.weighted(kl_weight)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(self._parameters, gradients, strict=True)
        used = {parameter: gradient for parameter, gradient in pairs if gradient is not None}
        self._parameters = [*used]
        return numbers_of(loss, terms, used.values()), *used.values()

    def _update(self, numbers: Tensor, *gradients: Tensor) -> Outputs:
        """Update the parameters by gradients, unless one of the numbers of a step is not finite."""
        self._set_gradients(gradients)
        is_broken = ~numbers[1:].sum().isfinite()
        self._optimizer.step_unless(is_broken.to(torch.float32), self._rates)
        return (numbers,)

    def _laid_out(self, outputs: Outputs) -> Outputs:
        """Return gradients laid out as their parameters, which fused optimizers take for granted."""
        numbers, *gradients = outputs
        pairs = zip(gradients, self._parameters, strict=True)
        laid_out = (
            grad if grad.stride() == own.stride() else torch.empty_like(own).copy_(grad)
            for grad, own in pairs
        )
        return numbers, *laid_out

    def _set_gradients(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    # ---- replays ---------------------------------------------------------------------------------

    def _replay(self, inputs: Sequence[Tensor]) -> Outputs:
        outputs = self._laid_out(self._records[0](inputs))
        return self._records[1](outputs) if self.updates else outputs

    def _warm_up(self, inputs: Sequence[Tensor]) -> Outputs:
        """Replay on a separate stream, as a capture will."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = self._replay(inputs)
        current.wait_stream(side)
        return outputs


# ---- CUDA graphs ------------------------------------------------------------------------------------


class CUDAGraph:
    """A function of tensors, captured once and replayed with other values of the same shapes."""

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
