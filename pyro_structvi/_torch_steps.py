"""Private parts of torch for recorded steps, each with its use and with what breaks without it."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode


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


def by_inductor(
    graph: fx.GraphModule, inputs: Sequence[Tensor], channels_last: bool
) -> Callable[..., Any]:
    """Compile a graph of operations, which changes, for tensors of the very sizes of these.

    Draws stay torch's own. ``torch.compile`` would read the graph as a user's code, and look at inputs
    in each call, and inductor at sizes: that would be much of a small net's step. On the CPU what calls
    kernels is compiled, too, and images are laid channels-last only where that is asked for.
    """
    options = {"fallback_random": True, "size_asserts": False, "alignment_asserts": False}
    for node in graph.graph.nodes:
        node.meta = {}  # a graph of two records has shapes of both, which inductor refuses
    if all(value.device.type == "cpu" for value in inputs):
        options |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
        options["layout_optimization"] = channels_last
    with torch.no_grad(), warnings.catch_warnings(), _errors_only("torch._inductor.ir"):
        for kind in (FutureWarning, DeprecationWarning):  # of torch about torch
            warnings.simplefilter("ignore", kind)
        from torch import _inductor  # which takes long, and is needed here only

        run: Callable[..., Any] = _inductor.compile(graph, [*inputs], options=options)
    return run


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# Operations that compilers do not know, or call through Python. Without their names they could not be
# written out for a compiler.
NORMS_OF_SEVERAL = torch.ops.aten._foreach_norm.Scalar
FUSED_ADAM = (torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adam_.tensor_lr)
FUSED_ADAMW = (torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_adamw_.tensor_lr)


def written_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation of torch's dispatcher writes into.

    Without it a write to a tensor on the host would be done once and left out of a CUDA graph, and a
    value that is written into could be taken for another of the same operation.
    """
    if operation in _WRITES_UNSAID:
        return [*args, *kwargs.values()]
    return [given for given, aliased in _aliased(operation, args, kwargs) if aliased.is_write]


_WRITES_UNSAID = {  # running statistics, of which their schema says nothing
    *(torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default),
    *(torch.ops.aten.miopen_batch_norm.default, torch.ops.aten.batch_norm.default),
}


def shared_argument(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument whose memory an operation of torch's dispatcher returns, or None.

    Without it a view could be taken for a value of its own.
    """
    returns = operation._schema.returns if isinstance(operation, torch._ops.OpOverload) else ()
    for own in (each.alias_info for each in returns if each.alias_info):
        for given, aliased in _aliased(operation, args, kwargs):
            if own.before_set <= aliased.before_set:  # that of a list of views names none
                return given
    return None


def _aliased(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments that an operation writes into or returns, with what its schema says."""
    if isinstance(operation, torch._ops.OpOverload):
        for place, each in enumerate(operation._schema.arguments):
            if each.alias_info:
                yield args[place] if place < len(args) else kwargs.get(each.name), each.alias_info


def is_mark_of_profiler(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher only tells a profiler where a function begins or ends.

    Optimizers of torch have such marks. Without it each replay of a step would make them.
    """
    is_operation = isinstance(operation, torch._ops.OpOverload)
    return is_operation and operation.namespace == "profiler"


def is_random(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


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


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together, on the device and in the dtype of the first one's.

    The public ``get_total_norm`` sorts tensors by device and dtype first, which takes longer than the
    norms themselves where a net is small.
    """
    norms = torch._foreach_norm([*tensors])
    together: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    return together


def can_skip_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can leave all as it is by a number on the device, as GradScaler has it do.

    Torch marks such optimizers with a private attribute. Without it a step captured on a GPU could not
    hold an update that depends on its gradients being finite.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and getattr(optimizer, "_step_supports_amp_scaling", False)


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions of others run before or after each step of an optimizer.

    Torch has no public question for it. Without it they would run when a step is recorded, and in no
    replay of it.
    """
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    return any((*own, *of_all))


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


@contextmanager
def shapes_of_one_record() -> Iterator[None]:
    """Let one mode keep the shapes of all values of a record.

    Torch's recorder keeps them by the mode of the trace that is under way, which only its compilers
    announce. Without it each value gets a mode of its own, with a list of Python's frames, and recording
    a step takes up to twice as long.
    """
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


def found_tensors(tensor: Tensor) -> list[Tensor] | None:
    """Return the tensors, found outside of a record, of which alone a value of it has been computed.

    Torch's recorder has no public way from a tensor to its operation. Without it a record could not tell
    a constant, such as a prior's scale that was viewed or taken apart, from what changes at each call.

    Returns:
        None if the value depends on an input of the record or a random number, or if something was
        written into what it was computed of.
    """
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    last = get_proxy_slot(tensor, tracer, None, lambda value: value.proxy.node)
    if last is None:
        return [tensor]
    found, seen, nodes = list[Tensor](), {last}, [last]
    while nodes:
        node = nodes.pop()
        if node.op == "get_attr":
            found.append(getattr(tracer.root, str(node.target)))
        elif (
            node.op != "call_function"
            or is_random(node.target)
            or written_arguments(node.target, node.args, node.kwargs)
        ):
            return None
        new = set(node.all_input_nodes) - seen
        seen |= new
        nodes += new
    return found


@contextmanager
def not_recorded() -> Iterator[None]:
    """Let a block run unrecorded and unwatched in the midst of a record.

    Without it a number that is known to stay could not be read where one that changes may not be.
    """
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let nets take the path that they have for torch's compilers, which reads no values of tensors.

    Torch has the flag for its own exporter. Without it nets of Hugging Face look into their masks in
    Python, and their steps could not be recorded.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
