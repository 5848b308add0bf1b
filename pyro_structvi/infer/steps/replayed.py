"""Replayed training steps, on a CPU or by CUDA graphs."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.recording import Outputs, Traced
from pyro_structvi.infer.steps.step import Call, Loss, SubsamplePlayer, numbers_of
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.linalg.matrices import rows_in_one


class CUDAGraph:
    """A function of tensors, captured once and replayed with other values.

    Args:
        function: From tensors to tensors.
        inputs: Tensors of the shapes of all that will come.
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
        """Replay with these inputs; the results are overwritten by the next call."""
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._outputs


GRAPH_DEVICE = "cuda"
WARM_UP = 3  # steps before a GPU's are captured, as torch advises

# Operations of loss and gradients. Compiling a deep net's update with these takes more than twice as
# long, and its steps no less time (docs/speed.md).
MOST_COMPILED_WITH_UPDATE = 2000


class ReplayedStep:
    """Terms of the loss and gradients of the parameters, without the Python that makes them.

    The first call traces them. On the CPU the second compiles what was traced, the update with it, or
    hands it to torch's interpreter. On a GPU some calls warm up, and the next captures everything as a
    CUDA graph.

    Args:
        loss: The loss, of which an eager step has been taken.
        optimizer: What updates the parameters.
        draws: How the plates draw their subsamples.
        backend: A backend of ``torch.compile``, None, or "auto".
        updates: Whether the optimizer's update is to be recorded too.
        checks: Whether the gradients' norm is asked for, without which it is 0, and an update left out
            where it is not finite.

    Attributes:
        keeps: What must stay alive with this step.
        difference: By how much the loss that was traced differs from Python's; None before that.
        refusal: Why the trace is not to be replayed, if so.

    Raises:
        RuntimeError: In a call, if it cannot be compiled.
    """

    keeps: Sequence[object] = ()
    difference: float | None = None
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
        self._loss, self._optimizer = loss, optimizer
        self._parameters = [p for p in optimizer.parameters if p.requires_grad]
        self._device = self._parameters[0].device
        self._captures = self._device.type == GRAPH_DEVICE
        self._updates = updates and (self._captures or optimizer.can_skip)
        self._checks = checks
        self._draws = (
            draws if self._captures else []
        )  # a graph on a GPU cannot hold the host's draws
        usual = None if self._captures else "inductor"
        self._backend = usual if backend == "auto" else backend
        self._is_prepared = False  # on the CPU
        dtype = torch.promote_types(torch.float32, self._parameters[0].dtype)
        self._kl_weight = torch.zeros((), dtype=dtype, device=self._device)
        self._traced: Traced | None = None
        self._traced_update: Traced | None = None
        self._joined: Traced | None = None  # loss, gradients and update as one
        self._may_join = self._updates and not self._captures
        self._is_given: list[bool] = []  # which of the outputs are not None
        self._graph: CUDAGraph | None = None
        self._options: list[dict[str, Any]] = []  # of the optimizer, in the graph
        self._sites: tuple[list[str], list[str]] = [], []
        self._calls = 0

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to compile."""
        return self._graph is not None if self._captures else self._is_prepared

    @property
    def holds(self) -> bool:
        """Whether numbers that the record is built on, such as priors' scales, are still the same."""
        return self._traced is None or self._traced.taken.are_as_taken()

    @property
    def traces_update(self) -> bool:
        """Whether each call updates the parameters, too, by operations that were traced."""
        return self._updates and not self._captures

    @property
    def has_updated(self) -> bool:
        """Whether the last call has updated the parameters, too."""
        return self.traces_update or (self._updates and self._graph is not None)

    def __call__(self, call: Call) -> Outputs:
        """Return what the step computes; parameters stay, unless the update is recorded, too."""
        self._kl_weight.fill_(self._loss.elbo.current_kl_weight)
        subsamples = [draw().to(self._device) for draw in self._draws]
        with torch.cuda.device_of(self._kl_weight):
            outputs = self._run(call, [self._kl_weight, *subsamples, *call.tensors])
        self._calls += 1
        return outputs

    def unpack(self, outputs: Outputs) -> tuple[Tensor, ELBOTerms]:
        """Give the parameters their gradients; return the numbers and the terms."""
        self._set_gradients(outputs)
        numbers, *values = (value for value in outputs if value is not None)
        values_of = iter(values)
        likelihood, kl = (dict(zip(names, values_of, strict=False)) for names in self._sites)
        return numbers, ELBOTerms(likelihood, kl)

    def _run(self, call: Call, inputs: list[Tensor]) -> Outputs:
        if self._updates and self._options != (options := self._optimizer.options):
            self._forget_update()
            self._options = options
        if self._updates:
            self._optimizer.read_rates()
        if self._captures:
            return self._run_on_gpu(call, inputs)
        if self._traced is None:
            outputs = self._trace(call, inputs)
        elif self._is_prepared:
            outputs = (self._joined or self._traced)(inputs)
        else:
            outputs = self._prepare(self._traced, inputs)
        if self._updates and self._joined is None:
            gradients = zip(outputs[-len(self._parameters) :], self._parameters, strict=True)
            own = [_laid_out_as(gradient, parameter) for gradient, parameter in gradients]
            self._run_update([v for v in (*outputs[: -len(own)], *own) if v is not None])
        return outputs

    def _forget_update(self) -> None:
        """Let the update be recorded anew, whose operations have the optimizer's options in them.

        They may change at every step, so from then on the update is apart.
        """
        if self._joined is not None:
            self._joined, self._is_prepared, self._may_join = None, False, False
        self._graph, self._traced_update = None, None

    def _run_on_gpu(self, call: Call, inputs: list[Tensor]) -> Outputs:
        if self._traced is None:
            return self._trace(call, inputs)
        if self._calls <= WARM_UP:
            return self._warm_up(inputs)
        if self._graph is None:
            self._graph = self._capture(self._traced, inputs)
        return self._graph(inputs)

    def _capture(self, traced: Traced, inputs: list[Tensor]) -> CUDAGraph:
        if not self._updates:
            return CUDAGraph(traced, inputs)

        def step(tensors: Sequence[Tensor]) -> Outputs:
            outputs = traced(tensors)
            self._update(outputs)
            return outputs if self._checks else outputs[: -len(self._parameters)]

        with self._optimizer.tensor_rates(self._device, captures=True):
            return CUDAGraph(step, inputs)

    def _trace(self, call: Call, inputs: list[Tensor]) -> Outputs:
        elsewhere = [value for value in call.tensors if value.device != self._device]
        if elsewhere:
            raise RuntimeError(
                f"The parameters are on {self._device}, but an argument is on {elsewhere[0].device}. "
                "Move it there before the step."
            )
        traced = Traced(lambda *given: self._differentiate(call, given), inputs)
        host = traced.random_on("cpu") if self._device.type == "cuda" else []
        if host:
            raise RuntimeError(
                f"{host} draws on the CPU, and a CUDA graph would repeat what it has drawn once. Draw "
                "on the GPU, or before the step and pass it as an argument."
            )
        outputs, traced.outputs = traced.outputs, ()
        if self._captures and self._backend is not None:
            traced.compile(self._backend, inputs)
        self._traced = traced
        self._is_given = [value is not None for value in outputs]
        return outputs

    def _run_update(self, outputs: list[Tensor]) -> None:
        """Update the parameters by what is not None of the outputs, by the interpreter once traced."""
        if self._traced_update is not None:
            self._traced_update(outputs)
            return

        def update(*tensors: Tensor) -> Outputs:
            given = iter(tensors)
            self._update([next(given) if is_given else None for is_given in self._is_given])
            return ()

        names = self._optimizer.state_names
        with self._optimizer.tensor_rates(self._device, captures=False):
            traced = Traced(update, outputs)
        if self._optimizer.state_names != names:
            raise RuntimeError("the optimizer makes its state in this step, not in the first")
        traced.interpret()
        self._traced_update = traced

    def compile(self, backend: str) -> None:
        """Let the next call compile what was traced, and all calls from then on run that.

        Args:
            backend: A backend of ``torch.compile``.
        """
        self._backend, self._is_prepared = backend, False

    def interpret(self) -> None:
        """Let torch's interpreter run the calls again that have run compiled."""
        self._backend, self._is_prepared = None, False

    def _prepare(self, traced: Traced, inputs: list[Tensor]) -> Outputs:
        self._joined = self._join(traced, inputs)
        whole = self._joined or traced
        if self._backend is None:
            whole.interpret()
        else:
            whole.compile(self._backend, inputs)
        outputs = whole(inputs)
        self._is_prepared = True
        return outputs

    def _join(self, traced: Traced, inputs: list[Tensor]) -> Traced | None:
        """Return loss, gradients and update as one, if the next calls are to run that."""
        compiles = self._backend is not None
        takes_long = compiles and traced.num_operations > MOST_COMPILED_WITH_UPDATE
        if not self._may_join or self._traced_update is None or takes_long:
            return None
        joined = traced.followed_by(self._traced_update, inputs)
        is_taken = not compiles or (self._backend == "inductor" and joined.can_be_compiled)
        return joined if is_taken else None

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
        for parameter, gradient in zip(
            self._parameters, outputs[-len(self._parameters) :], strict=True
        ):
            parameter.grad = _laid_out_as(gradient, parameter)

    def _update(self, outputs: Sequence[Tensor | None]) -> None:
        """Update the parameters by what a step returned."""
        self._set_gradients(outputs)
        numbers = outputs[0]
        if not self._checks or numbers is None:
            self._optimizer.step()
        else:
            parts = numbers[1:]  # of which the check of a fit reads the sum, too
            self._optimizer.step(skip=(~parts.sum().isfinite()).to(torch.float32))

    def _warm_up(self, inputs: Sequence[Tensor]) -> Outputs:
        """Run on a separate stream, as a capture will."""
        assert self._traced is not None
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = self._traced(inputs)
        current.wait_stream(side)
        return outputs


def _laid_out_as(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return a gradient in its parameter's layout, which fused optimizers take for granted."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
