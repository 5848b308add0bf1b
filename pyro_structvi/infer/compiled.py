"""Stochastic variational inference of which a step is one compiled function."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from pyro.infer.util import torch_item
from pyro.optim import PyroOptim
from pyro.poutine.runtime import _PYRO_PARAM_STORE
from torch import Tensor, nn

from pyro_structvi.families import SitePosterior
from pyro_structvi.infer.compiled_step import Call, CompiledStep, SubsampleRecorder
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.one_optimizer import OneOptimizer
from pyro_structvi.infer.tracing import explain

MANY_STEPS = 16


class CompileFallbackWarning(UserWarning):
    """A step could not be compiled, and runs as ``SVI`` would run it."""


class _NotCompiledError(Exception):
    """A step could not be compiled; the message says why."""


class CompiledSVI:
    r"""``SVI`` of which a step runs without Pyro's handlers, and with few kernels.

    The first step with inputs of new shapes is an ordinary one. The second is traced: model, guide,
    ELBO and gradients become a graph of tensor operations. From then on this graph runs: on the CPU
    compiled by ``torch.compile``, which takes some seconds; on a GPU, after three steps that warm it
    up, as a CUDA graph that also holds the optimizer's update. All of these are real steps, and draw
    the noise that ``SVI`` would draw from the same seed, so the losses are those of ``SVI`` up to
    rounding.

    What Python decides, it decides once for each combination of shapes, dtypes, other arguments, modules
    with their parameters, buffers and training modes, and autocast: an ``if`` on a counter is not asked
    again. Values of parameters and buffers, learning rates and the weight of the KL are read at each
    step; plates draw new subsamples.

    Args:
        model: The model.
        guide: The guide.
        optim: A Pyro optimizer such as ``pyro.optim.Adam({"lr": 1e-3})``, of which one fused torch
            optimizer is made; or a torch optimizer, which trains the parameters that it was made of.
        loss: A :class:`StructuredELBO`; with ``fallback`` any of Pyro's.
        backend: A backend of ``torch.compile``, or None to run the traced operations one by one.
            "auto" is "inductor" on the CPU, which needs a C++ compiler, and None on a GPU.
        fallback: Whether a step that cannot be compiled runs as ``SVI`` runs it, with a
            :class:`CompileFallbackWarning`, instead of raising.

    Raises:
        TypeError: If ``optim`` or ``loss`` is of the wrong kind.
        ValueError: If ``optim`` has the state of single parameters.

    Example:
        >>> import pyro
        >>> from pyro_structvi import Classifier, KTiedGuide, bayesianize
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = Classifier(bayesianize(net, prior=1.0), num_data=20)
        >>> optim = pyro.optim.Adam({"lr": 1e-2})
        >>> svi = CompiledSVI(model, KTiedGuide(model), optim, StructuredELBO(), backend=None)
        >>> x, y = torch.randn(20, 4), torch.zeros(20, dtype=torch.long)
        >>> losses = [svi.step(x, y) for _ in range(50)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: PyroOptim | torch.optim.Optimizer,
        loss: ELBO,
        *,
        backend: str | None = "auto",
        fallback: bool = False,
    ) -> None:
        if not isinstance(loss, StructuredELBO) and not (fallback and isinstance(loss, ELBO)):
            raise TypeError(
                f"`loss` must be a StructuredELBO, but got {type(loss).__name__}, which is not known to "
                "leave tensors' values unread. Write `loss=StructuredELBO()`, or use `pyro.infer.SVI`."
            )
        self.model, self.guide, self.loss = model, guide, loss
        self.backend, self.fallback = backend, fallback
        self._optimizer = OneOptimizer(optim)
        self._roots = [*_modules_of(model), *_modules_of(guide)]
        self._stored: list[str] = []  # parameters that are found in Pyro's store
        self._steps: dict[Hashable, CompiledStep] = {}
        self._uncompiled: set[Hashable] = set()  # calls that have fallen back

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer; None before the first step, where one of Pyro's was given."""
        return self._optimizer.torch

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take a step of optimization.

        Args:
            *args: Arguments of model and guide. Tensors may hold other values at each step.
            **kwargs: Keyword arguments, likewise.

        Returns:
            The loss before the step.

        Raises:
            RuntimeError: If the step cannot be compiled; the message names the line at fault.
                Parameters, buffers and torch's random generators are then those before the step.
            TypeError: If an argument is neither a tensor nor hashable.
            ValueError: If there is no parameter to train.
        """
        call = Call(args, kwargs)
        if call.key in self._uncompiled:
            return self._interpret(call)
        if self._optimizer.was_loaded():
            self._steps.clear()
        key = call.key, self._state()
        if key not in self._steps:
            return self._first_step(call)
        compiled = self._steps[key]
        try:
            if compiled.is_ready:
                return float(compiled(call))
            with self._unchanged_on_error() as check:
                return float(compiled(call, check))
        except _NotCompiledError as error:
            if not self.fallback:
                raise RuntimeError(
                    f"{error} Pass `fallback=True` to go on without."
                ) from error.__cause__
            del self._steps[key]
            self._fall_back(call, str(error))
        return self._interpret(call)

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """Return an estimate of the loss, without gradients and without a step.

        Args:
            *args: Arguments of model and guide.
            **kwargs: Their keyword arguments.
        """
        with torch.no_grad():
            return float(torch_item(self.loss.loss(self.model, self.guide, *args, **kwargs)))

    def _first_step(self, call: Call) -> float:
        """Take an ordinary step, which finds parameters and plates."""
        recorder = SubsampleRecorder()
        with recorder:
            loss = self._interpret(call)
        key = call.key, self._state()  # now that the parameters are known
        self._optimizer.was_loaded()
        if isinstance(self.loss, StructuredELBO):
            parts = self.model, self.guide, self.loss, self._optimizer
            self._steps[key] = CompiledStep(*parts, self.backend, recorder.laws)
        else:
            self._fall_back(call, f"{type(self.loss).__name__} cannot be compiled.")
        if len(self._steps) == MANY_STEPS:
            warnings.warn(
                f"{MANY_STEPS} kinds of steps have been compiled, by shapes, arguments and modes. Pass "
                "numbers that change as tensors, and pad what has many sizes.",
                stacklevel=3,
            )
        return loss

    def _fall_back(self, call: Call, reason: str) -> None:
        warnings.warn(f"{reason} The step runs uncompiled.", CompileFallbackWarning, stacklevel=4)
        self._uncompiled.add(call.key)

    def _interpret(self, call: Call) -> float:
        """Take a step as ``SVI`` does, but with one optimizer."""
        with poutine.trace(param_only=True) as capture:
            loss = self.loss.loss_and_grads(self.model, self.guide, *call.args, **call.kwargs)
        found = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
        self._stored = [name for name in capture.trace.nodes if name in _PYRO_PARAM_STORE._params]
        self._optimizer.adopt(dict.fromkeys(found))
        if not any(parameter.requires_grad for parameter in self._optimizer.parameters):
            raise ValueError("Model and guide must have a parameter to train, but got none.")
        self._optimizer.step(
            (parameter, parameter.grad) for parameter in self._optimizer.parameters
        )
        for parameter in found:
            parameter.grad = None
        return float(torch_item(loss))

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[Callable[[], None]]:
        """Put buffers and random generators back if the step cannot be compiled, and say why.

        What it gives refuses a model that has replaced a buffer.
        """
        buffers = list(self._buffers())
        values = [buffer.clone() for *_, buffer in buffers]
        generators = [torch.default_generator, *_gpu_generators(self._optimizer.parameters)]
        states = [generator.get_state() for generator in generators]

        def check() -> None:
            for module, name, buffer in buffers:
                if module._buffers.get(name) is not buffer:
                    raise RuntimeError(
                        f"the model replaces its buffer `{name}`; change it in place"
                    )

        try:
            yield check
        except Exception as error:
            for (module, name, buffer), value in zip(buffers, values, strict=True):
                module._buffers[name] = buffer.copy_(value)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            raise _NotCompiledError(f"This step cannot be compiled: {explain(error)}.") from error

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for root in self._roots:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        yield module, name, buffer

    def _state(self) -> Hashable:
        """Return what decides how model and guide run, besides their arguments."""
        parts: list[Hashable] = [_Same(_PYRO_PARAM_STORE._params.get(n)) for n in self._stored]
        for root in self._roots:
            for module in root.modules():
                family = module.family if isinstance(module, SitePosterior) else None
                parts += [_Same(module), module.training, family]
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        parts += [_Same(tensor), tensor.requires_grad, tensor.data_ptr()]
        for kind in sorted({value.device.type for value in self._optimizer.parameters}):
            parts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
        return tuple(parts)


class _Same:
    """A key that is equal only for one and the same object, which it keeps."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _modules_of(part: Callable[..., Any]) -> Iterator[nn.Module]:
    """Return the modules that a model or guide is, is a method of, or closes over."""
    function = poutine.unwrap(part)
    closed_over = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (function, getattr(function, "__self__", None), *closed_over):
        if isinstance(value, nn.Module):
            yield value


def _gpu_generators(parameters: Iterable[nn.Parameter]) -> list[torch.Generator]:
    """Return the random generators of the GPUs that hold parameters."""
    indices = {value.device.index for value in parameters if value.device.type == "cuda"}
    return [torch.cuda.default_generators[index] for index in indices]
