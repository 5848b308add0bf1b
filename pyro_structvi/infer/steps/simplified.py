"""A recorded graph without what repeats: unused and constant values, and those computed twice."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_structvi._torch_steps import (
    is_mark_of_profiler,
    is_random,
    shared_argument,
    written_arguments,
)

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
