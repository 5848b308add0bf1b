"""Records of functions of tensors as graphs of torch operations."""

import linecache
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from pyro_structvi import _torch
from pyro_structvi._torch import is_random, tree_leaves, written_arguments
from pyro_structvi.infer.steps.state import saved
from pyro_structvi.linalg.matrices import autocast_off

Outputs = tuple[Tensor, ...]


class _Recorder(_torch.DispatchMode):
    """Writes the operations of a block into a graph while they run; its inputs change between calls."""

    def __init__(
        self, inputs: Sequence[Tensor], undo: list[Callable[[], None]] | None = None
    ) -> None:
        super().__init__()
        self._undo = undo
        self.graph = fx.Graph()
        self.found: dict[fx.Node, Tensor] = {}  # elsewhere than in the block, such as parameters
        self.read: dict[fx.Node, Any] = {}  # values that Python reads
        self.written: set[StorageWeakRef | None] = set()  # memory
        self.memory: dict[fx.Node, StorageWeakRef | None] = {}  # of results
        self._nodes = _torch.TensorKeyDictionary()
        self._by_layout: dict[Any, fx.Node] = {}
        self._of_inputs = {_memory_of(tensor) for tensor in inputs}
        self._is_on_host = inputs[0].device.type == "cpu"
        for tensor in inputs:
            self._add_placeholder(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "profiler":  # the mark of an optimizer's function
            return func(*args, **kwargs)
        _refuse_sizes(func, args)
        is_read = torch.Tag.data_dependent_output in func.tags
        if not is_read and self._is_constant_of_host(func, args, kwargs):
            return func(*args, **kwargs)  # its result is found
        node = self.graph.call_function(func, *_torch.tree_map(self.node_of, (args, kwargs)))
        if is_read:
            return self._read(node, func(*args, **kwargs))
        written = tree_leaves(written_arguments(func, args, kwargs))
        new = {_memory_of(each) for each in written if isinstance(each, Tensor)} - self.written
        if new and self._undo is not None:
            self._undo.append(saved(self.constants_in(new)))
        self.written |= new
        results = func(*args, **kwargs)
        if isinstance(results, (list, tuple)):
            for number, result in enumerate(results):
                self._name(result, self.graph.call_function(operator.getitem, (node, number)))
        else:
            self._name(results, node)
        return results

    def node_of(self, argument: Any) -> Any:
        """Return the node of a tensor, and any other argument as it is."""
        if isinstance(argument, torch.Generator):
            raise RuntimeError("an operation draws by a generator of its own")
        if not isinstance(argument, Tensor):
            return argument
        node: fx.Node | None = self._nodes.get(argument)
        if node is None:
            node = self._add_placeholder(argument)
            self.found[node] = argument
        return node

    def _add_placeholder(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"t{len(self.memory)}")
        self._name(tensor, node)
        self._nodes[tensor] = node  # also of one of several tensors in the same memory
        return node

    def _name(self, result: Any, node: fx.Node) -> None:
        """Give a result its node: an earlier one if that has the same memory and layout."""
        if not isinstance(result, Tensor):
            return
        node.meta["elements"] = result.numel()
        self.memory[node] = memory = _memory_of(result)
        # Inputs may share memory in this call only.
        if memory is not None and memory not in self._of_inputs:
            layout = result.storage_offset(), result.shape, result.stride(), result.dtype
            key = memory, *layout, result.is_conj(), result.is_neg()
            node = self._by_layout.setdefault(key, node)
        self._nodes[result] = node

    def _read(self, node: fx.Node, value: Any) -> Any:
        """Return a value that Python reads, if it depends on inputs and constants only."""
        before = [node]
        for each in before:  # which grows meanwhile
            before += [other for other in each.all_input_nodes if other not in before]
        is_trained = any(self.found[each].requires_grad for each in before if each in self.found)
        is_changing = any(self.memory.get(each) in self.written for each in before)
        if is_trained or is_changing or not all(map(_is_pure, before)):
            raise RuntimeError("Python reads a tensor's value")
        if any(each.op == "placeholder" for each in before):
            self.read[node] = value
        return value

    def _is_constant_of_host(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation depends on constants of the host only, for parameters on a GPU.

        A CUDA graph neither runs it again nor copies its result from the host.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = "cpu" if tensors else torch.device(kwargs.get("device") or "cpu").type
        nodes = [self._nodes.get(tensor) for tensor in tensors]
        if (
            self._is_on_host
            or {device, *(tensor.device.type for tensor in tensors)} != {"cpu"}
            or any(node is not None and node not in self.found for node in nodes)
        ):
            return False
        if is_random(function):
            raise RuntimeError(
                f"`{function}` draws on the CPU, and a CUDA graph would repeat what it has drawn once. "
                "Draw on the GPU (a plate by its `device`), or before the step, as an argument."
            )
        if tensors and written_arguments(function, args, kwargs):
            raise RuntimeError(f"`{function}` changes a tensor of the host")
        return True

    def constants_in(self, memory: set[StorageWeakRef | None]) -> list[Tensor]:
        """Return the tensors in memory that are found elsewhere."""
        return [tensor for node, tensor in self.found.items() if self.memory[node] in memory]

    def part(self, returned: list[fx.Node], with_writes: bool) -> tuple[fx.Graph, list[Tensor]]:
        """Return the operations that results need, and all that write, with the tensors they find."""
        nodes, needed = [*self.graph.nodes], {*returned}
        for node in reversed(nodes):
            is_input = node.op == "placeholder" and node not in self.found
            if node in needed or is_input or (with_writes and not _is_pure(node)):
                needed |= {node, *node.all_input_nodes}
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in sorted(nodes, key=lambda node: node.op != "placeholder"):
            if node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in returned))
        return graph, [self.found[node] for node in copies if node in self.found]


def _memory_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return what is equal for tensors that share memory, now and later; None without memory."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # of sparse tensors
        return None


def _is_pure(node: fx.Node) -> bool:
    """Whether the results are all that an operation does, and the same in each call."""
    if node.op != "call_function":
        return True
    writes = written_arguments(node.target, node.args, node.kwargs)
    return not (writes or is_random(node.target))


def _refuse_sizes(operation: Any, args: tuple[Any, ...]) -> None:
    """Refuse operations whose result has as many elements as values determine."""
    has_size_of_values = torch.Tag.dynamic_output_shape in operation.tags
    if operation is torch.ops.aten.index.Tensor:
        indexes = [index for index in args[1] if index is not None]
        has_size_of_values = any(index.dtype in (torch.bool, torch.uint8) for index in indexes)
    if has_size_of_values:
        raise RuntimeError(f"the size of a result depends on values in `{operation}`")


class _RefusesPython(TorchFunctionMode):
    """Refuses reads of values that are no operation of the dispatcher, such as those of lengths."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        second = [each for each in [*args, *kwargs.values()][1:2] if isinstance(each, Tensor)]
        reads_second = (
            func in _torch.READERS_OF_SECOND and second and not second[0].is_floating_point()
        )
        if func in _torch.READERS or reads_second:
            raise RuntimeError(f"Python reads a tensor's value by `{func.__name__}`")
        return func(*args, **kwargs)


class Record:
    """The operations of one call of a function of tensors, to be repeated with other tensors.

    Tensors that the function finds elsewhere, such as parameters and buffers, are read and written as
    they are at each call. Random numbers are drawn anew. Python may read values that follow from the
    inputs and from constants; the record holds for inputs with the same values. Reads of other values,
    and sizes that depend on values, are an error. The recorded call is an ordinary one, with results
    ``outputs``; functions that restore what it writes are added to ``undo``.
    """

    def __init__(
        self,
        function: Callable[..., Outputs],
        inputs: Sequence[Tensor],
        undo: list[Callable[[], None]] | None = None,
    ) -> None:
        # Aliases, since a tensor in two roles would be one input in both.
        apart = [value.detach() for value in inputs]
        recorder = _Recorder(apart, undo)
        with (
            torch.autograd.set_multithreading_enabled(False),
            _torch.recording(),
            recorder,
            _RefusesPython(),
        ):
            self.outputs = function(*apart)
        returned = [recorder.node_of(value) for value in self.outputs]
        self.graph, self.found = recorder.part(returned, with_writes=True)
        self._run = self._run_operations = _function_of(self.graph)
        reads, self._read_tensors = recorder.part([*recorder.read], with_writes=False)
        self._run_reads, self._read = _function_of(reads), (*recorder.read.values(),)
        self.written = recorder.constants_in(recorder.written)  # such as running statistics

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Repeat the call with other inputs of the same shapes."""
        with torch.no_grad(), autocast_off(inputs[0]):  # casts are operations of the record
            return self._run(*inputs, *self.found)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the values that Python read are the same for these inputs."""
        if not self._read:
            return True
        with torch.no_grad(), autocast_off(inputs[0]):
            return bool(self._run_reads(*inputs, *self._read_tensors) == self._read)

    @property
    def operations(self) -> list[Any]:
        """The operations of torch's dispatcher, in order."""
        targets = [node.target for node in self.graph.nodes if node.op == "call_function"]
        return [target for target in targets if target is not operator.getitem]

    @property
    def num_elements(self) -> int:
        """The number of elements of all results."""
        return sum(node.meta.get("elements", 0) for node in self.graph.nodes)

    def compile(self, backend: str, inputs: Sequence[Tensor]) -> None:
        """Let a backend of ``torch.compile`` fuse the operations for calls with such inputs.

        Random numbers still come from torch's generators. "auto" is inductor if it takes all operations.
        """
        if not _torch.LSTM_LAYERS.isdisjoint(self.operations):
            if backend == "auto":
                return
            raise RuntimeError("torch's LSTM layer on a CPU cannot be compiled")
        module = fx.GraphModule(torch.nn.Module(), deepcopy(self.graph))  # compilers change it
        if backend in ("auto", "inductor"):
            self._run = _torch.by_inductor(module, [*inputs, *self.found])
        else:
            self._run = torch.compile(module, backend=backend, dynamic=False)

    def interpret(self) -> None:
        """Run the operations one by one again."""
        self._run = self._run_operations


def _function_of(graph: fx.Graph) -> Callable[..., Any]:
    """Return the operations as a Python function, which calls them without torch's layer of Python."""
    code = graph.python_code("self")
    operations = {node.target for node in graph.nodes if node.op == "call_function"}
    names = {f"torch.ops.{each}".replace(".", "_"): each for each in operations}
    known = code.globals | {name: _torch.fast_call(each) for name, each in names.items()}
    exec(re.sub(r"torch\.ops(\.\w+){3}", lambda found: found[0].replace(".", "_"), code.src), known)
    return partial(known["forward"], None)


class NotCompiledError(Exception):
    """A step cannot be recorded, compiled or captured; the message is the reason."""


@contextmanager
def explained() -> Iterator[None]:
    """Raise an error of a block with its reason, and the line outside of torch, Pyro and this folder."""
    try:
        yield
    except Exception as error:
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
        parts = (torch, pyro, sys.modules[__package__])
        folders = (f"{Path(str(each.__file__)).parent}{os.sep}" for each in parts)
        inside = (*folders, str(_torch.__file__), "<")
        frames = traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if not frame.filename.startswith(inside)]
        if outside:
            line = linecache.getline(outside[-1].filename, outside[-1].lineno or 0).strip()
            message += f", at {outside[-1].filename}:{outside[-1].lineno}, `{line}`"
        raise NotCompiledError(message) from error
