"""A step of optimization for inputs of one shape, each time run in the fastest way known so far."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_structvi._torch import inside_transform
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.one_optimizer import OneOptimizer
from pyro_structvi.infer.tracing import Outputs, Traced

GRAPH_DEVICE = "cuda"
WARM_UP = 3  # steps before a GPU's are captured, as torch advises


class Call:
    """The arguments of one call, their tensors apart from what they stand in.

    Raises:
        TypeError: If an argument is neither a tensor nor hashable.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        kinds = [
            (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            for value in self.tensors
        ]
        types = [type(leaf) for leaf in leaves]
        self.key = (self._structure, *types, *self._leaves, *kinds)
        for leaf in self._leaves:
            by_value = isinstance(leaf, Hashable) and type(leaf).__hash__ is not object.__hash__
            if not (by_value or leaf is None or callable(leaf)):
                raise TypeError(
                    f"The arguments of a compiled step must be tensors or hashable, but got {leaf!r}. "
                    "Pass arrays as tensors, and objects by their parts."
                )

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        given = iter(tensors)
        leaves = [
            next(given) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


class SubsampleRecorder(Messenger):
    """Records how plates draw their subsamples, in the order in which they do."""

    def __init__(self) -> None:
        super().__init__()
        self.laws: list[_Subsample] = []

    def _pyro_sample(self, message: dict[str, Any]) -> None:
        if _is_random_subsample(message):
            self.laws.append(message["fn"])


class SubsamplePlayer(Messenger):
    """Hands plates subsamples that were drawn beforehand, in the recorded order."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self._values = iter(values)

    def _pyro_sample(self, message: dict[str, Any]) -> None:
        if _is_random_subsample(message):
            if inside_transform():
                raise RuntimeError("particles in one pass share a plate's subsample in a graph")
            message["value"] = next(self._values, None)  # None is drawn as ever


def _is_random_subsample(message: dict[str, Any]) -> bool:
    law = message["fn"]
    return (
        isinstance(law, _Subsample)
        and message["value"] is None
        and law.subsample_size is not None
        and law.subsample_size < law.size
    )


class CompiledStep:
    """A step of optimization; every call is a real step.

    The first call traces the loss and its gradients. On the CPU the second compiles what was traced. On
    a GPU some calls warm up, and the next captures everything, the update included, as a CUDA graph.

    Args:
        model: The model.
        guide: The guide, which has been initialized.
        loss: The objective.
        optimizer: What updates the parameters.
        backend: A backend of ``torch.compile``, or None.
        laws: How the plates draw their subsamples.

    Raises:
        RuntimeError: In a call, if the step cannot be compiled.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        loss: StructuredELBO,
        optimizer: OneOptimizer,
        backend: str | None,
        laws: Sequence[_Subsample],
    ) -> None:
        self._model, self._guide, self._loss, self._optimizer = model, guide, loss, optimizer
        self._parameters = [p for p in optimizer.parameters if p.requires_grad]
        self._device = self._parameters[0].device
        self._captures = self._device.type == GRAPH_DEVICE
        self._laws = laws if self._captures else []  # a graph on a GPU cannot hold the host's draws
        usual = None if self._captures else "inductor"
        self._backend = usual if backend == "auto" else backend
        dtype = torch.promote_types(torch.float32, self._parameters[0].dtype)
        self._kl_weight = torch.zeros((), dtype=dtype, device=self._device)
        self._traced: Traced | None = None
        self._graph: CUDAGraph | None = None
        self._options: list[dict[str, Any]] = []  # of the optimizer, in the graph
        self._calls = 0

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to compile."""
        return self._graph is not None if self._captures else self._calls >= 2

    def __call__(self, call: Call, check: Callable[[], None] = lambda: None) -> Tensor:
        """Take a step and return the loss before it, ``()``; a check comes between trace and update."""
        self._kl_weight.fill_(self._loss.current_kl_weight)
        subsamples = [law().to(self._device) for law in self._laws]
        with torch.cuda.device_of(self._kl_weight):
            loss = self._run(call, [self._kl_weight, *subsamples, *call.tensors], check)
        self._loss.step += 1
        self._calls += 1
        return loss

    def _run(self, call: Call, inputs: list[Tensor], check: Callable[[], None]) -> Tensor:
        if self._traced is None:
            return self._trace(call, inputs, check)
        if not self._captures:
            return self._update(self._traced(inputs))
        if self._calls <= WARM_UP:
            return self._warm_up(inputs)
        self._optimizer.use_tensor_rates(self._device)
        if self._graph is None or self._options != self._optimizer.options:
            self._options = self._optimizer.options
            self._graph = CUDAGraph(self._whole_step, inputs)
        return self._graph(inputs)

    def _trace(self, call: Call, inputs: list[Tensor], check: Callable[[], None]) -> Tensor:
        elsewhere = [value for value in call.tensors if value.device != self._device]
        if elsewhere:
            raise RuntimeError(
                f"The parameters are on {self._device}, but an argument is on {elsewhere[0].device}. "
                "Move it there before the step."
            )
        traced = Traced(lambda *tensors: self._differentiate(call, tensors), inputs)
        host = traced.random_on("cpu") if self._device.type == "cuda" else []
        if host:
            raise RuntimeError(
                f"{host} draws on the CPU, and a CUDA graph would repeat what it has drawn once. Draw "
                "on the GPU, or before the step and pass it as an argument."
            )
        check()
        loss = self._update(traced.outputs)
        traced.outputs = ()
        if self._backend is not None:
            traced.compile(self._backend)
        self._traced = traced
        return loss

    def _differentiate(self, call: Call, tensors: Sequence[Tensor]) -> Outputs:
        """Return the loss and the gradient of each parameter."""
        kl_weight, *given = tensors
        subsamples, given = given[: len(self._laws)], given[len(self._laws) :]
        args, kwargs = call.with_tensors(given)
        with pyro.validation_enabled(False), SubsamplePlayer(subsamples):
            terms = self._loss.terms(self._model, self._guide, *args, **kwargs)
        loss = -terms.weighted(kl_weight)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return loss.detach(), *gradients

    def _update(self, outputs: Outputs) -> Tensor:
        loss, *gradients = outputs
        laid_out = map(_laid_out_as, gradients, self._parameters)
        self._optimizer.step(zip(self._parameters, laid_out, strict=True))
        assert loss is not None
        return loss

    def _whole_step(self, inputs: Sequence[Tensor]) -> Tensor:
        assert self._traced is not None
        return self._update(self._traced(inputs))

    def _warm_up(self, inputs: Sequence[Tensor]) -> Tensor:
        """Take a step on a stream of its own, as a capture will."""
        current, own = torch.cuda.current_stream(), torch.cuda.Stream()
        own.wait_stream(current)
        with torch.cuda.stream(own):
            loss = self._whole_step(inputs)
        current.wait_stream(own)
        return loss


class CUDAGraph:
    """A function of tensors, captured once and replayed with other values.

    Args:
        function: From tensors to one tensor.
        inputs: Tensors of the shapes of all that will come.
    """

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._inputs = [value.detach().clone() for value in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # of this device; torch's own is of the first that captured
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._output = function(self._inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Replay with these inputs; the result is overwritten by the next call."""
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._output


def _laid_out_as(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    """Return a gradient in its parameter's layout, which fused optimizers take for granted."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
