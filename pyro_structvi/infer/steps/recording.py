"""Records of training steps as graphs of torch operations."""

import copy
import linecache
import operator
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pyro_structvi import _torch, _torch_steps
from pyro_structvi._torch_steps import (
    is_mark_of_profiler,
    is_random,
    shared_argument,
    written_arguments,
)
from pyro_structvi.infer.steps.decompositions import is_elementary, make_elementary, make_explicit
from pyro_structvi.linalg.known_numbers import TakenNumbers, taking
from pyro_structvi.linalg.precision import autocast_off

LARGEST = 2**16  # elements of a constant that is kept


def simplify(graph: fx.Graph, inputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
    """Take out what a graph need not compute, or not again; what it returns stays the same.

    Operations that compute the same of the same are one, unless something is written into what they read
    or return. Views of a tensor can be shared in any case.

    Args:
        graph: Operations of torch's dispatcher, changed in place.
        inputs: What it will be called with, or tensors of the same layouts that share memory likewise.

    Returns:
        What depends on no tensor, by its node.
    """
    for node in reversed(graph.nodes):
        if is_mark_of_profiler(node.target) or not (node.users or _must_stay(node)):
            graph.erase_node(node)
    memory = _memory(graph, inputs)
    changing = {memory[value] for node in graph.nodes for value in _written_or_returned(node)}
    versions = dict.fromkeys(memory, 0)  # how often each memory has been written into so far
    starts: dict[fx.Node, fx.Node] = {}  # the first value that begins at the same place in memory
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        is_view = memory[node] is not node
        starts[node] = starts[node.all_input_nodes[0]] if node.target in _SAME_START else node
        key: Any = None
        if starts[node] is not node:
            key = starts[node], _layout(node)
        elif not _must_stay(node) and (is_view or node not in changing):
            read = () if is_view else tuple(versions[memory[n]] for n in node.all_input_nodes)
            key = node.target, _comparable(node.args), _comparable(node.kwargs), read
        known.setdefault((node, _layout(node)), node)
        before = known.setdefault(key, node) if key else node
        if before is not node:
            node.replace_all_uses_with(before)
            graph.erase_node(node)
        for value in _written_or_returned(node):
            versions[memory[value]] += 1
    return _constants(graph, memory, changing)


_SAME_START = {  # views that begin where their argument does
    *(torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten.t.default),
    *(torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten.permute.default),
    *(torch.ops.aten.unsqueeze.default, torch.ops.aten.transpose.int, torch.ops.aten.squeeze.dim),
}


def _layout(node: fx.Node) -> Any:
    """Return shape, strides and dtype of a value; of what torch keeps no record, the node itself."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return node
    return value.shape, value.stride(), value.dtype


def _must_stay(node: fx.Node) -> bool:
    """Whether a node is no operation, or draws, or writes."""
    is_operation = node.op == "call_function"
    return is_random(node.target) or not is_operation or bool(_written_or_returned(node))


def _memory(graph: fx.Graph, inputs: Sequence[Tensor]) -> dict[fx.Node, fx.Node]:
    """Return for each value the first one in whose memory it lies."""
    memory: dict[fx.Node, fx.Node] = {}
    first: dict[int, fx.Node] = {}
    given = iter(inputs)
    for node in graph.nodes:
        memory[node] = node
        if node.op == "placeholder":
            address = next(given).untyped_storage().data_ptr()
            memory[node] = first.setdefault(address, node) if address else node
        elif node.target is operator.getitem:
            memory[node] = memory[node.args[0]]
        elif isinstance(shared := shared_argument(node.target, node.args, node.kwargs), fx.Node):
            memory[node] = memory[shared]
    return memory


def _written_or_returned(node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation writes into, or that whoever runs the graph may."""
    if node.op == "output":
        return node.all_input_nodes
    found: list[fx.Node] = []
    fx.map_arg(tuple(written_arguments(node.target, node.args, node.kwargs)), found.append)
    return found


def _constants(
    graph: fx.Graph, memory: dict[fx.Node, fx.Node], changing: set[fx.Node]
) -> dict[fx.Node, Tensor]:
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        depends = any(value not in values for value in node.all_input_nodes)
        if not (depends or _must_stay(node) or memory[node] in changing):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = node.target(*args, **kwargs)
            if isinstance(value, Tensor) and value.numel() <= LARGEST:
                values[node] = value
    return values


def _comparable(argument: Any) -> Any:
    """Return what is equal for equal arguments."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_comparable, argument))
    if isinstance(argument, dict):
        return tuple((name, _comparable(value)) for name, value in sorted(argument.items()))
    return argument if isinstance(argument, fx.Node) else repr(argument)


Outputs = tuple[Tensor | None, ...]


class Traced:
    """What a function of tensors did in one call, to be repeated with other tensors and fresh noise.

    Tensors that the function found elsewhere, such as parameters and buffers, are used, and changed, as
    they are at each call. Only on the host of a GPU all that depends on nothing else is computed once.

    Args:
        function: From a list of tensors to tensors.
        inputs: The tensors of the call that is recorded; an ordinary call in every respect.

    Attributes:
        outputs: What that call returned; to be let go of, once used.
        graph: The operations, a function of the inputs and then of ``found``.
        found: The tensors that the function found elsewhere.
        taken: Numbers in some of these that the record is built on; with others it does not hold.

    Raises:
        RuntimeError: If Python reads a tensor's value, or a size that depends on values.
    """

    def __init__(self, function: Callable[..., Outputs], inputs: Sequence[Tensor]) -> None:
        self.taken = TakenNumbers()

        def record(*tensors: Tensor) -> Outputs:
            with (
                taking(self.taken),
                _RefusesPython(),
                _torch_steps.as_if_compiling(),
                _torch_steps.Watch(_refuse_sizes),
            ):
                self.outputs = function(*tensors)
            return self.outputs

        # Aliases, since a tensor in two roles would be taken for one input in both.
        apart = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
        with torch.autograd.set_multithreading_enabled(False), _torch_steps.shapes_of_one_record():
            graph = make_fx(record)(*apart)
        make_explicit(graph.graph)
        self._random = [
            (str(node.target), _device_type(node))
            for node in graph.graph.nodes
            if _torch_steps.is_random(node.target)
        ]
        values = _found(graph)
        if any(value.device.type != "cpu" for value in inputs):
            values |= _compute_on_host(list(graph.graph.nodes), values)
        self.found = _lift(graph, values)
        self.found += _lift(graph, simplify(graph.graph, [*apart, *self.found]))
        self.graph = graph
        self._run: Callable[..., Outputs] = graph

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Repeat the call with other inputs of the same shapes."""
        with torch.no_grad(), autocast_off(inputs[0]):  # what is to be cast, the trace casts
            return self._run(*inputs, *self.found)

    def compile(self, backend: str, inputs: Sequence[Tensor]) -> None:
        """Let a compiler fuse the operations; draws stay those of torch's generators.

        Args:
            backend: A backend of ``torch.compile``.
            inputs: Those of the next call.
        """
        if backend == "inductor":
            graph = copy.deepcopy(self.graph)
            make_elementary(graph.graph)
            last = _has_channels_last(graph.graph)
            self._run = _torch_steps.by_inductor(graph, [*inputs, *self.found], last)
        else:
            self._run = torch.compile(self.graph, backend=backend, dynamic=False)

    def followed_by(self, update: "Traced", inputs: Sequence[Tensor]) -> "Traced":
        """Return this and an update by what it returns, as one.

        Args:
            update: A record that takes what is not None of the outputs of this one, and returns nothing.
            inputs: What it will be called with, or tensors of the same layouts that share memory alike.

        Returns:
            What does both, and returns what this one does.
        """
        graph = fx.Graph()
        given = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        later = [node for node in update.graph.graph.nodes if node.op == "placeholder"]
        env = {node: graph.node_copy(node) for node in given[: len(inputs)]}
        found: dict[int, tuple[fx.Node, Tensor]] = {}
        own = zip(given[len(inputs) :], self.found, strict=True)
        others = zip(later[len(later) - len(update.found) :], update.found, strict=True)
        for node, value in (*own, *others):
            if id(value) not in found:
                found[id(value)] = graph.placeholder(f"found_{len(graph.nodes)}"), value
                found[id(value)][0].meta = node.meta
            env[node] = found[id(value)][0]
        outputs: Any = graph.graph_copy(self.graph.graph, env)
        passed_on = [value for value in outputs if value is not None]
        for node, value in zip(later[: len(passed_on)], passed_on, strict=True):
            env[node] = _with_strides_of(graph, node, value)
        graph.graph_copy(update.graph.graph, env)
        graph.output(outputs)
        joined = copy.copy(self)
        joined.graph = joined._run = fx.GraphModule(self.graph, graph)
        joined.found = [value for _, value in found.values()]
        joined.found += _lift(joined.graph, simplify(graph, [*inputs, *joined.found]))
        return joined

    @property
    def num_operations(self) -> int:
        """How many operations there are."""
        return sum(node.op == "call_function" for node in self.graph.graph.nodes)

    @property
    def can_be_compiled(self) -> bool:
        """Whether inductor takes all of its operations."""
        return is_elementary(self.graph.graph)

    def interpret(self) -> None:
        """Let torch's interpreter run the operations, or Python where it does not know one of them."""
        try:
            self._run = _interpreted(self.graph)
        except NotImplementedError:
            self._run = self.graph

    def random_on(self, kind: str) -> list[str]:
        """Return the random operations whose results are on a kind of device."""
        return [name for name, device in self._random if device == kind]


def _interpreted(graph: fx.GraphModule) -> Callable[..., Outputs]:
    """Return a graph of operations on tensors as torch's interpreter runs it."""
    own = _torch_steps.OperationGraph()
    values: dict[fx.Node, Any] = {}
    outputs: Sequence[fx.Node | None] = ()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = own.input()
        elif node.target is operator.getitem:
            values[node] = fx.map_arg(node.args[0], values.__getitem__)[node.args[1]]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = node.meta.get("val")  # of some operations torch keeps none
            count = len(value) if isinstance(value, list) else None
            values[node] = own.call(node.target, args, kwargs, count)
        else:
            outputs = node.args[0]
    run = own.function([values[node] for node in outputs if node is not None])
    is_given = [node is not None for node in outputs]

    def interpreted(*tensors: Tensor) -> Outputs:
        given = iter(run(*tensors))
        return tuple(next(given) if is_there else None for is_there in is_given)

    return interpreted


class _RefusesPython(TorchFunctionMode):
    """Refuses what reads values without an operation that could be recorded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise RuntimeError(f"Python reads a tensor's value by `{func.__name__}`")
        return func(*args, **(kwargs or {}))


def _refuse_sizes(operation: Any, args: tuple[Any, ...]) -> None:
    """Refuse operations whose result has as many elements as their values say."""
    indexes = operation is torch.ops.aten.index.Tensor
    masks = [i for i in args[1] if i is not None] if indexes else []
    by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in masks)
    if by_mask or (torch.Tag.dynamic_output_shape in operation.tags and not masks):
        raise RuntimeError(f"the size of a result depends on values in `{operation}`")


def _found(graph: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """Return the tensors that a traced function found elsewhere."""
    found = {n: getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"}
    return {node: value for node, value in found.items() if isinstance(value, Tensor)}


def _lift(graph: fx.GraphModule, values: dict[fx.Node, Tensor]) -> list[Tensor]:
    """Turn nodes with known values into further inputs; return those, each tensor once."""
    new, env = fx.Graph(), {}
    lifted: dict[int, tuple[fx.Node, Tensor]] = {}
    nodes = list(graph.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            env[node] = new.node_copy(node)
    for node, value in values.items():
        if any(user not in values for user in node.users):
            if id(value) not in lifted:
                lifted[id(value)] = new.placeholder(f"found_{len(new.nodes)}"), value
                lifted[id(value)][0].meta = node.meta
            env[node] = lifted[id(value)][0]
    for node in nodes:
        if node not in env and node not in values:
            env[node] = new.node_copy(node, env.__getitem__)
    graph.graph = new
    return [value for _, value in lifted.values()]


def _has_channels_last(graph: fx.Graph) -> bool:
    """Whether most images that are convolved lie channels-last, which is slower where they do not."""
    convolution: Any = torch.ops.aten.convolution.default
    nodes = graph.find_nodes(op="call_function", target=convolution)
    images: list[Tensor | None] = [node.args[0].meta.get("val") for node in nodes]
    last = [
        value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        for value in images
        if value is not None and not value.is_contiguous()  # of some torch keeps none
    ]
    return 2 * sum(last) > len(images)


def _with_strides_of(graph: fx.Graph, like: fx.Node, value: fx.Node) -> fx.Node:
    """Return a value in the memory layout that was recorded for another."""
    own, other = value.meta["val"], like.meta["val"]
    if own.stride() == other.stride():
        return value
    aten: Any = torch.ops.aten
    place = graph.call_function(
        aten.new_empty_strided.default, (value, [*other.shape], [*other.stride()])
    )
    return graph.call_function(aten.copy.default, (place, value))


def _compute_on_host(nodes: list[fx.Node], found: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """Compute what depends on nothing but tensors of the host, up to its copies to a device."""
    host = {node: value for node, value in found.items() if value.device.type == "cpu"}
    for node in nodes:
        needs = node.all_input_nodes
        if node.op != "call_function" or not all(need in host for need in needs):
            continue
        operation: Any = node.target
        if needs and _torch_steps.written_arguments(operation, node.args, node.kwargs):
            raise RuntimeError(f"`{operation}` changes a tensor of the host")
        if (needs and _torch_steps.is_copy(operation)) or _device_type(node) == "cpu":
            args, kwargs = fx.map_arg((node.args, node.kwargs), host.__getitem__)
            host[node] = operation(*args, **kwargs)
    return host


def _device_type(node: fx.Node) -> str:
    return str(getattr(node.meta.get("val"), "device", torch.device("meta")).type)


def explain(error: BaseException) -> str:
    """Say what prevents tracing, and the line outside of torch and Pyro that does."""
    message = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "_local_scalar_dense" in message:
        message = "Python reads a tensor's value"
    line = _origin_of(error)
    return f"{message}, at {line}" if line else message


def _origin_of(error: BaseException) -> str | None:
    libraries = tuple(f"{Path(str(library.__file__)).parent}{os.sep}" for library in (torch, pyro))
    own = __file__, str(_torch.__file__), str(_torch_steps.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*libraries, *own, "<"))]
    if not outside:
        return None
    line = linecache.getline(outside[-1].filename, outside[-1].lineno or 0).strip()
    return f"{outside[-1].filename}:{outside[-1].lineno}, `{line}`"
