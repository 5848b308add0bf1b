"""Private parts of torch, each with its use and with what breaks without it."""

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map as tree_map  # as in torch.func, for nested arguments

T = TypeVar("T", bound=Tensor)


def inside_transform() -> bool:
    """Whether this code runs inside a transform of ``torch.func``, such as vmap.

    Torch has no public question for it. Without it a gradient written by hand that has no rule for a
    transform would raise under it, in place of torch's own operations.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_jit_trace() -> bool:
    """Whether ``torch.jit.trace`` records what runs here, as Pyro's ``JitTrace_ELBO`` lets it.

    Torch does not name it among what its module exports. Without it a function that writes in place,
    which that tracer does not take, would raise.
    """
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def inside_forward_derivative() -> bool:
    """Whether this code runs inside a level of forward-mode differentiation, ``forward_ad.dual_level``.

    Torch has no public question for it. Without it a net that is differentiated in its inputs would be
    taken for one that is applied once.
    """
    return forward_ad._current_level >= 0


def is_tracing() -> bool:
    """Whether ``make_fx`` records what runs here, so that tensors' values may not steer Python.

    Without it a branch on a value would raise while a step is traced.
    """
    return get_proxy_mode() is not None


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass, as the recomputation of a checkpoint does.

    Torch has no public question for it. Without it a layer that is recomputed would draw new weights.
    """
    return torch._C._current_graph_task_id() != -1


def after_backward(act: Callable[[], None]) -> None:
    """Act when the backward pass that this code runs inside is over.

    Torch has no public way to do so. Without it a later backward pass could take a former pass's values.
    """
    Variable._execution_engine.queue_callback(act)


def inside_checkpoint() -> bool:
    """Whether this code runs inside a part of a net that activation checkpointing computes twice.

    Torch has no question for it, and only the stack of calls tells. Without it a weight could be drawn
    in the first computation and again in the second.
    """
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame in _frames())


def inside_reentrant_backward() -> bool:
    """Whether this code recomputes a checkpoint that differentiates by a backward pass of its own.

    Without it the gradients of weights, which are no inputs of the checkpoint, would be lost.
    """
    code = checkpoint.CheckpointFunction.backward.__code__
    return any(frame.f_code is code for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def without_storage(cls: type[T], shape: torch.Size, like: Tensor) -> T:
    """Return a tensor of a subclass that has a shape, and the dtype and device of ``like``, only.

    Torch documents the constructor for subclasses without giving it a public name. Without it a weight
    that has not been drawn would hold memory of a weight's size.
    """
    stand_in: T = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
    return stand_in


def reshape_without_view(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Reshape a tensor that nothing else holds into one that autograd does not take for a view.

    Autograd adds gradients in place where they are no views. Without it the gradient of a weight's size
    would be copied.
    """
    reshaped: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return reshaped


# The common base of batch and instance normalization in all dimensions, lazy and synchronized ones too.
# Public classes would have to be listed one by one, and a new one would get a prior by mistake.
BatchOrInstanceNorm = _NormBase

# What ``nn.utils.parametrizations.spectral_norm`` puts on a weight. Without it the weight would be
# divided by a norm that was estimated from other draws.
SpectralParametrization = _SpectralNorm


def is_householder(parametrization: Any) -> bool:
    """Whether a parametrization makes a weight orthogonal by Householder reflections.

    Only the private class says by which map. Without it columns of a draw would silently become zeros.
    """
    is_orthogonal = isinstance(parametrization, _Orthogonal)
    return is_orthogonal and bool(parametrization.orthogonal_map.name == "householder")


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before and after a module's forward pass.

    Torch can add and remove hooks, and not list them. Without it a layer under ``weight_norm`` would be
    replaced by one that does not do what the hook does.
    """
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextmanager
def unlisted_weights(net: nn.Module) -> Iterator[None]:
    """Keep recurrent layers from listing, and so computing, their weights while these change.

    A recurrent layer reads its list whenever one of its weights is set. Without it the weights that have
    become sample sites would be drawn while the others are still parameters.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.RNNBase)]
    names = [vars(layer).pop("_flat_weights_names") for layer in layers]
    yield
    for layer, own in zip(layers, names, strict=True):
        layer._flat_weights_names = own


def take_apart(tree: Any) -> tuple[list[Any], Hashable]:
    """Return the leaves of nested lists, tuples and dicts, and the structure that holds them.

    Torch keeps its trees private. Without it only flat arguments could be compiled.
    """
    return pytree.tree_flatten(tree)


def put_together(leaves: list[Any], structure: Any) -> Any:
    """Return other leaves in the structure from ``take_apart``."""
    return pytree.tree_unflatten(leaves, structure)


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's parameters and buffers without those of its submodules.

    Torch's public generators take several times as long, and a compiled step asks each module. Without
    it a compiled step would not see that a parameter or a buffer was replaced.
    """
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


class OperationGraph:
    """Operations of torch's dispatcher, one after the other, as torch's interpreter of graphs runs them.

    Only TorchScript has such an interpreter, and only tracing and compiling source code fill it in
    public; neither takes every operation. Without it each operation of a traced step would pass through
    Python, at four times the cost.
    """

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()

    def input(self) -> Any:
        """Add a tensor that the graph is called with, and return it."""
        return self._graph.addInput()

    def call(
        self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], count: int | None = None
    ) -> Any:
        """Add an operation on values of this graph and constants; return its value, or several.

        Args:
            operation: An operation of torch's dispatcher.
            args: Its arguments.
            kwargs: Its keyword arguments.
            count: How many tensors are in the list that it returns, if it returns one.

        Raises:
            NotImplementedError: If the interpreter does not know it with such arguments.
        """
        schema = operation._schema
        values = []
        for number, argument in enumerate(schema.arguments):
            given = kwargs.get(argument.name, argument.default_value)
            given = args[number] if number < len(args) else given
            values.append(self._value(given, argument.type))
        kinds = [returned.type for returned in schema.returns]
        if is_copy(operation) and isinstance(args[0], (bool, int, float)):
            values[0] = self._graph.insertConstant(torch.tensor(args[0]))
        results = self._node(schema.name, values, kinds)
        if any(isinstance(kind, torch._C.ListType) for kind in kinds):
            if count is None or len(results) > 1:
                raise NotImplementedError(schema.name)
            return self._node("prim::ListUnpack", results, [torch._C.TensorType.get()] * count)
        return results[0] if len(results) == 1 else results

    def function(self, outputs: Sequence[Any]) -> Callable[..., tuple[Tensor, ...]]:
        """Return the graph as a function from its inputs to these values of it."""
        kind = torch._C.TupleType([torch._C.TensorType.get()] * len(outputs))
        (packed,) = self._node("prim::TupleConstruct", outputs, [kind])
        self._graph.registerOutput(packed)
        made: Any = torch._C._create_function_from_graph("step", self._graph)

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                outputs: tuple[Tensor, ...] = made(*inputs)  # by the very operations, as they are
            return outputs

        return run

    def _value(self, given: Any, kind: Any) -> Any:
        if isinstance(given, (list, tuple)) and any(isinstance(v, torch._C.Value) for v in given):
            item: Any = torch._C.TensorType.get()
            if any(value is None for value in given):
                item = torch._C.OptionalType(item)
            items = [self._value(value, item) for value in given]
            return self._node("prim::ListConstruct", items, [torch._C.ListType(item)])[0]
        if isinstance(given, torch._C.Value):
            return given
        if isinstance(given, (list, tuple)) and not given:
            kind = kind.getElementType() if kind.kind() == "OptionalType" else kind
            return self._node("prim::ListConstruct", [], [kind])[0]
        if isinstance(given, torch.memory_format):
            given = _MEMORY_FORMATS.index(given)
        try:
            return self._graph.insertConstant([*given] if isinstance(given, tuple) else given)
        except TypeError as error:
            raise NotImplementedError(f"a constant of type {type(given).__name__}") from error

    def _node(self, name: str, values: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
        node = self._graph.insertNode(self._graph.create(name, [*values], len(kinds)))
        if not name.startswith("prim::") and node.schema() == _NO_SCHEMA:
            raise NotImplementedError(name)
        results = [*node.outputs()]
        for result, kind in zip(results, kinds, strict=True):
            result.setType(kind)
        return results


_NO_SCHEMA = "(no schema)"
_MEMORY_FORMATS = [  # as torch numbers them
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
]


def all_modules(root: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, each once.

    Torch's public generator takes several times as long, and a compiled step asks for them. Without it a
    compiled step would not see that a module was replaced.
    """
    found, waiting = {root: None}, [root]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return [*found]


def changes_its_arguments(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher writes into one of its arguments.

    Without it a write to a tensor on the host would be done once and left out of a CUDA graph.
    """
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def is_copy(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher is what ``Tensor.to`` records.

    Without it a constant of the host would be copied to a GPU in each replay of a graph.
    """
    return bool(operation is torch.ops.aten._to_copy.default)


def keep_from_warning(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer that can be captured from warning of each step taken without a capture.

    Without it the steps before a CUDA graph is captured would warn.
    """
    optimizer._warned_capturable_if_run_uncaptured = True


def can_skip_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can leave all as it is by a number on the device, as GradScaler has it do.

    Torch marks such optimizers with a private attribute. Without it a step captured on a GPU could not
    hold an update that depends on its gradients being finite.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and getattr(optimizer, "_step_supports_amp_scaling", False)


class Watch(TorchDispatchMode):
    """Shows operations with their arguments, before they run, as they reach torch's dispatcher.

    Torch has no public hook for it. Without it an operation whose result has as many elements as values
    say would be recorded with the size of one call.

    Args:
        see: Called with an operation and its positional arguments.
    """

    def __init__(self, see: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Show an operation, then run it."""
        self._see(func, args)
        return func(*args, **(kwargs or {}))
