"""Records of training steps as lists of torch operations."""

import linecache
import operator
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from pyro_structvi import _torch
from pyro_structvi._torch import (
    DispatchMode,
    TensorKeyDictionary,
    is_profiler_mark,
    is_random,
    tree_leaves,
    tree_map,
    written_arguments,
)
from pyro_structvi.linalg.matrices import autocast_off

CONVOLUTION = torch.ops.aten.convolution.default
LARGEST = 2**16  # elements of a constant that is kept

Outputs = tuple[Tensor | None, ...]


@dataclass(eq=False, frozen=True)
class Value:
    """A tensor of a record.

    Attributes:
        storage: Equal for values that share memory.
        layout: Equal for views of the same elements.
    """

    storage: int
    layout: tuple[Any, ...] = ()


@dataclass(eq=False)
class Operation:
    """An operation of torch's dispatcher with its arguments; tensors are :class:`Value`.

    Attributes:
        results: The values that it returns.
        returns_list: Whether it returns several tensors.
        constants: The recorded results, if no argument is a value.
        is_channels_last: Whether it convolves an image that is channels-last.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Value] = field(default_factory=list)
    returns_list: bool = False
    constants: list[Tensor] = field(default_factory=list)
    is_channels_last: bool = False

    @property
    def inputs(self) -> list[Value]:
        """The values among the arguments."""
        return _values((self.args, self.kwargs))

    @property
    def written(self) -> list[Value]:
        """The values that the operation changes in place."""
        return _values(written_arguments(self.function, self.args, self.kwargs))

    @property
    def is_pure(self) -> bool:
        """Whether the results are all that the operation does, and the same in each call."""
        return not (is_random(self.function) or self.written)


def _values(arguments: Any) -> list[Value]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Value)]


class _Recorder(DispatchMode):
    """Records the operations of a block while they run.

    Args:
        inputs: The tensors that change between calls.
        device: Type of the device of the parameters.
    """

    def __init__(self, inputs: Sequence[Tensor], device: str) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.found: dict[Value, Tensor] = {}
        self._device = device
        self.read: list[tuple[Operation, Any]] = []  # operations that tell Python a value, and it
        self._written: set[int] = set()  # storages
        self._known = TensorKeyDictionary()
        self._made_by: dict[Value, Operation] = {}
        self._numbers = count(1)
        self._storages: dict[int, int] = {}  # of found tensors, by their address
        self.inputs = [self._new_value(tensor, {}) for tensor in inputs]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it.

        Raises:
            RuntimeError: If Python reads a value that only the step knows, or if the size of a result
                depends on values.
        """
        kwargs = kwargs or {}
        if is_profiler_mark(func):
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return self._read(func, args, kwargs)
        _refuse_sizes(func, args)
        if self._is_of_host(func, args, kwargs):
            return func(*args, **kwargs)  # its result is found, as a constant
        operation = Operation(func, *tree_map(self.value_of, (args, kwargs)))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {_address(tensor): self.value_of(tensor).storage for tensor in given}
        results = func(*args, **kwargs)
        operation.returns_list = isinstance(results, (list, tuple))
        tensors = list(results) if operation.returns_list else [results]
        operation.results = [self._new_value(tensor, storages) for tensor in tensors]
        if func is CONVOLUTION:
            operation.is_channels_last = _is_channels_last(args[0])
        if not operation.inputs and operation.is_pure:
            operation.constants = [tensor for tensor in tensors if tensor.numel() <= LARGEST]
        self.operations.append(operation)
        self._made_by |= dict.fromkeys(operation.results, operation)
        self._written |= {value.storage for value in operation.written}
        return results

    def value_of(self, argument: Any) -> Any:
        """Return the value of a tensor, and any other argument as it is."""
        if not isinstance(argument, Tensor):
            return argument
        value: Value | None = self._known.get(argument)
        if value is None:
            value = self._new_value(argument, self._storages)
            self._storages[_address(argument)] = value.storage
            self.found[value] = argument
        return value

    def _new_value(self, tensor: Any, storages: dict[int, int]) -> Value:
        """Return a new value in one of these storages, or in a new one."""
        if not isinstance(tensor, Tensor):
            return Value(0)
        address = _address(tensor)
        storage = (storages.get(address) if address else None) or next(self._numbers)
        value = Value(storage, _layout(tensor))
        self._known[tensor] = value
        return value

    def _read(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that tells Python a value, and record it unless the value is a constant.

        Raises:
            RuntimeError: If the value depends on a parameter, a random number or a change in place.
        """
        operation = Operation(function, *tree_map(self.value_of, (args, kwargs)))
        operation.results = [Value(0)]
        todo, is_constant = operation.inputs, True
        while todo:
            value = todo.pop()
            tensor, origin = self.found.get(value), self._made_by.get(value)
            is_known = value in self.inputs or (tensor is not None and not tensor.requires_grad)
            is_computed = origin is not None and origin.is_pure
            if value.storage in self._written or not (is_known or is_computed):
                raise RuntimeError("Python reads a tensor's value")
            is_constant = is_constant and not is_known
            todo += [] if origin is None else origin.inputs
        result = function(*args, **kwargs)
        if not is_constant:
            self.read.append((operation, result))
        return result

    def _is_of_host(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation depends on constants of the host only, for parameters on a GPU.

        A CUDA graph neither runs it again nor copies its result from the host.
        """
        if self._device == "cpu":
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self._known.get(tensor) for tensor in tensors]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return False
        if any(value is not None and value not in self.found for value in values):
            return False
        if not tensors and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return False
        if is_random(function):
            raise RuntimeError(
                f"`{function}` draws on the CPU, and a CUDA graph would repeat what it has drawn once. "
                "Draw on the GPU, or before the step and pass it as an argument."
            )
        if tensors and written_arguments(function, args, kwargs):
            raise RuntimeError(f"`{function}` changes a tensor of the host")
        return True


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and others without a storage
        return 0


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return ()
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def _refuse_sizes(operation: Any, args: tuple[Any, ...]) -> None:
    """Refuse operations whose result has as many elements as values determine."""
    has_size_of_values = torch.Tag.dynamic_output_shape in operation.tags
    has_size_of_values |= operation is _torch.PACKING
    if operation is torch.ops.aten.index.Tensor:
        indexes = [index for index in args[1] if index is not None]
        has_size_of_values = any(index.dtype in (torch.bool, torch.uint8) for index in indexes)
    if has_size_of_values:
        raise RuntimeError(f"the size of a result depends on values in `{operation}`")


class _RefusesPython(TorchFunctionMode):
    """Refuses reads of values that are no operation of the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise RuntimeError(f"Python reads a tensor's value by `{func.__name__}`")
        return func(*args, **(kwargs or {}))


class Record:
    """The operations of one call of a function of tensors, to be repeated with other tensors.

    Tensors that the function finds elsewhere, such as parameters and buffers, are read and written as
    they are at each call. Random numbers are drawn anew. Python may read values that follow from the
    inputs and from constants; the record holds for inputs with the same values.

    Args:
        function: A function from tensors to a tuple of tensors.
        inputs: The tensors of the recorded call, an ordinary call in every respect.

    Attributes:
        outputs: The results of that call.

    Raises:
        RuntimeError: If Python reads a value that depends on a parameter or a random number, or if a
            size depends on values.
    """

    def __init__(self, function: Callable[..., Outputs], inputs: Sequence[Tensor]) -> None:
        # Aliases, since a tensor in two roles would be one input in both.
        apart = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
        recorder = _Recorder(apart, inputs[0].device.type)
        with (
            torch.autograd.set_multithreading_enabled(False),
            _torch.recording(),
            recorder,
            _RefusesPython(),
        ):
            self.outputs = function(*apart)
        self._inputs = recorder.inputs
        self._read = tuple(result for _, result in recorder.read)
        self._reads, self._read_tensors = _reads(recorder)
        self._returned: list[Value | None] = [recorder.value_of(v) for v in self.outputs]
        operations, found = recorder.operations, recorder.found
        self._operations = _simplified(operations, self._inputs, found, self._returned)
        self.has_channels_last = _has_channels_last(self._operations)
        used = {value for each in self._operations for value in each.inputs} | {*self._returned}
        self._found = [value for value in found if value in used]
        self._tensors = [found[value] for value in self._found]
        self._run = _python_function(self._inputs + self._found, self._operations, self._returned)

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Repeat the call with other inputs of the same shapes."""
        with torch.no_grad(), autocast_off(inputs[0]):  # casts are operations of the record
            return self._run(*inputs, *self._tensors)

    @property
    def can_be_compiled(self) -> bool:
        """Whether compilers take all operations."""
        return all(each.function not in _torch.LSTM_LAYERS for each in self._operations)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the values that Python read are the same for these inputs."""
        if not self._read:
            return True
        with torch.no_grad(), autocast_off(inputs[0]):
            return self._reads(*inputs, *self._read_tensors) == self._read

    def compile(self, backend: str, inputs: Sequence[Tensor]) -> None:
        """Let a compiler fuse the operations; random numbers stay those of torch's generators.

        Args:
            backend: A backend of ``torch.compile``.
            inputs: The inputs of the next call.

        Raises:
            RuntimeError: If it does not take an operation.
        """
        if not self.can_be_compiled:
            raise RuntimeError("torch's LSTM layer on a CPU cannot be compiled")
        graph = _graph(self._inputs + self._found, self._operations, self._returned)
        if backend == "inductor":
            tensors = [*inputs, *self._tensors]
            self._run = _torch.by_inductor(graph, tensors, self.has_channels_last)
        else:
            self._run = torch.compile(graph, backend=backend, dynamic=False)

    def interpret(self) -> None:
        """Run the operations one by one again."""
        self._run = _python_function(self._inputs + self._found, self._operations, self._returned)

    def __len__(self) -> int:
        """The number of operations."""
        return len(self._operations)


def _reads(recorder: _Recorder) -> tuple[Callable[..., Outputs], list[Tensor]]:
    """Return the values that Python reads as a function of inputs and of the tensors returned."""
    operations = [replace(each, results=[*each.results]) for each in recorder.operations]
    operations = [each for each in operations if each.is_pure]
    operations += [operation for operation, _ in recorder.read]
    returned: list[Value | None] = [operation.results[0] for operation, _ in recorder.read]
    found = dict(recorder.found)
    kept = _simplified(operations, recorder.inputs, found, returned)
    used = {value for each in kept for value in each.inputs}
    found = {value: tensor for value, tensor in found.items() if value in used}
    return _python_function([*recorder.inputs, *found], kept, returned), [*found.values()]


def _simplified(
    operations: Sequence[Operation],
    inputs: Sequence[Value],
    found: dict[Value, Tensor],
    returned: list[Value | None],
) -> list[Operation]:
    """Return the operations without repeated and unused ones, and with small constants in ``found``.

    Memory that is written, or returned to a caller who may write it, is left alone.
    """
    changing = {value.storage for each in operations for value in each.written}
    changing |= {value.storage for value in returned if value is not None}
    same: dict[Value, Value] = {}
    views = {(v.storage, v.layout): v for v in (*inputs, *found)}
    known: dict[Any, list[Value]] = {}
    kept: list[Operation] = []

    def replaced(argument: Any) -> Any:
        return same.get(argument, argument) if isinstance(argument, Value) else argument

    for each in operations:
        each.args, each.kwargs = tree_map(replaced, (each.args, each.kwargs))
        results = each.results
        if each.is_pure and not {v.storage for v in (*each.inputs, *results)} & changing:
            if each.constants and len(each.constants) == len(results):
                found |= dict(zip(results, each.constants, strict=True))
                continue
            key = each.function, _comparable(each.args), _comparable(each.kwargs)
            if key in known:
                same |= dict(zip(results, known[key], strict=True))
                continue
            known[key] = results
        if each.is_pure and len(results) == 1 and results[0].layout:
            view = views.setdefault((results[0].storage, results[0].layout), results[0])
            if view is not results[0]:
                same[results[0]] = view
                each.results[:] = [view]  # for later operations that equal this one
                continue
        kept.append(each)
    returned[:] = map(replaced, returned)
    needed = {value for value in returned if value is not None}
    used: list[Operation] = []
    for each in reversed(kept):
        if not each.is_pure or needed.intersection(each.results):
            needed.update(each.inputs)
            used.append(each)
    return used[::-1]


def _comparable(argument: Any) -> Any:
    """Return an object that is equal for equal arguments."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_comparable, argument))
    if isinstance(argument, dict):
        return tuple((name, _comparable(value)) for name, value in sorted(argument.items()))
    return argument if isinstance(argument, Value) else repr(argument)


def _has_channels_last(operations: Sequence[Operation]) -> bool:
    """Whether most convolved images are channels-last."""
    convolutions = [each for each in operations if each.function is CONVOLUTION]
    return 2 * sum(each.is_channels_last for each in convolutions) > len(convolutions)


def _is_channels_last(image: Tensor) -> bool:
    channels_last = image.ndim == 4 and image.is_contiguous(memory_format=torch.channels_last)
    return channels_last and not image.is_contiguous()


def _python_function(
    inputs: Sequence[Value], operations: Sequence[Operation], returned: Sequence[Value | None]
) -> Callable[..., Outputs]:
    """Return the operations as a Python function, which frees each tensor after its last use."""
    names = {value: f"t{number}" for number, value in enumerate(inputs)}
    known: dict[str, Any] = {}

    def text(argument: Any) -> str:
        if isinstance(argument, Value):
            return names[argument]
        if isinstance(argument, (list, tuple)):
            items = "".join(f"{text(item)}, " for item in argument)
            return f"[{items}]" if isinstance(argument, list) else f"({items})"
        if argument is None or type(argument) in (bool, int):
            return repr(argument)
        name = f"c{len(known)}"
        known[name] = argument
        return name

    last = {value: each for each in operations for value in each.inputs}
    kept = {*inputs, *returned}
    lines = [f"def run({', '.join(names.values())}):"]
    for each in operations:
        function = text(_torch.fast_call(each.function))
        arguments = [text(argument) for argument in each.args]
        arguments += [f"{name}={text(argument)}" for name, argument in each.kwargs.items()]
        names |= {value: f"t{len(names) + i}" for i, value in enumerate(each.results)}
        results = ", ".join(names[value] for value in each.results)
        target = f"{results}, = " if each.returns_list else f"{results} = "
        lines.append((target if each.results else "") + f"{function}({', '.join(arguments)})")
        done = {value for value in (*each.inputs, *each.results) if last.get(value, each) is each}
        if done - kept:
            lines.append(f"del {', '.join(sorted(names[value] for value in done - kept))}")
    lines.append(f"return {text(tuple(returned))}")
    exec("\n    ".join(lines), known)
    function_of_tensors: Callable[..., Outputs] = known["run"]
    return function_of_tensors


def _graph(
    inputs: Sequence[Value], operations: Sequence[Operation], returned: Sequence[Value | None]
) -> fx.GraphModule:
    """Return the operations as a graph for compilers."""
    graph = fx.Graph()
    nodes: dict[Value, Any] = {v: graph.placeholder(f"t{i}") for i, v in enumerate(inputs)}

    def node_of(argument: Any) -> Any:
        return nodes[argument] if isinstance(argument, Value) else argument

    for each in operations:
        args, kwargs = tree_map(node_of, (each.args, each.kwargs))
        node = graph.call_function(each.function, args, kwargs)
        for number, value in enumerate(each.results):
            nodes[value] = (
                graph.call_function(operator.getitem, (node, number)) if each.returns_list else node
            )
    graph.output(tuple(map(node_of, returned)))
    return fx.GraphModule(torch.nn.Module(), graph)


def explain(error: BaseException) -> str:
    """Return the reason why a step cannot be recorded, and the line outside of torch and Pyro."""
    message = next(iter(str(error).strip().splitlines()), type(error).__name__)
    line = _origin_of(error)
    return f"{message}, at {line}" if line else message


def _origin_of(error: BaseException) -> str | None:
    libraries = tuple(f"{Path(str(library.__file__)).parent}{os.sep}" for library in (torch, pyro))
    own = __file__, str(_torch.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*libraries, *own, "<"))]
    if not outside:
        return None
    line = linecache.getline(outside[-1].filename, outside[-1].lineno or 0).strip()
    return f"{outside[-1].filename}:{outside[-1].lineno}, `{line}`"
