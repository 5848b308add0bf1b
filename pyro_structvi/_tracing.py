"""Loss and gradients as a graph of tensor operations, without the Python that made them."""

import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_structvi._autocast import autocast_off

_TRACING: ContextVar[bool] = ContextVar("tracing", default=False)

Outputs = tuple[Tensor | None, ...]


def is_tracing() -> bool:
    """Whether tensors' values may not steer Python, since what it does is recorded to be repeated."""
    return _TRACING.get()


@contextmanager
def _tracing() -> Iterator[None]:
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


class Traced:
    """What a function of tensors did in one call, to be repeated with other tensors and fresh noise.

    Tensors that the function found elsewhere, such as parameters and buffers, are used, and changed, as
    they are at each call.

    Args:
        function: From a list of tensors to tensors.
        inputs: The tensors of the call that is recorded; an ordinary call in every respect.

    Attributes:
        outputs: What that call returned.
        graph: The operations, a function of the inputs and then of ``found``.
        found: The tensors that the function found elsewhere.

    Raises:
        RuntimeError: If Python reads a tensor's value.
    """

    def __init__(self, function: Callable[..., Outputs], inputs: Sequence[Tensor]) -> None:
        def record(*tensors: Tensor) -> Outputs:
            self.outputs = function(*tensors)
            return self.outputs

        with _tracing():
            graph = make_fx(record)(*inputs)
        self.found = _lift_found(graph)
        self.graph: Callable[..., Outputs] = graph
        self._nodes = graph.graph.nodes

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Repeat the call with other inputs of the same shapes."""
        with torch.no_grad(), autocast_off(inputs[0]):  # what is to be cast, the trace casts
            return self.graph(*inputs, *self.found)

    def compile(self, backend: str) -> None:
        """Let ``torch.compile`` fuse the operations; draws stay those of torch's generators."""
        own: Any = {"options": {"fallback_random": True}} if backend == "inductor" else {}
        self.graph = torch.compile(self.graph, backend=backend, dynamic=False, **own)

    def random_on(self, kind: str) -> list[str]:
        """Return the random operations whose results are on a kind of device."""
        return [
            str(node.target)
            for node in self._nodes
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            and getattr(node.meta.get("val"), "device", torch.device("meta")).type == kind
        ]


def _lift_found(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a traced function found elsewhere into further inputs, and return them."""
    nodes, found = graph.graph.nodes, {}
    first = next(node for node in nodes if node.op != "placeholder")
    for node in [node for node in nodes if node.op == "get_attr"]:
        value = getattr(graph, str(node.target))
        if not isinstance(value, Tensor):
            continue
        if id(value) not in found:
            with graph.graph.inserting_before(first):
                found[id(value)] = graph.graph.placeholder(str(node.target)), value
        node.replace_all_uses_with(found[id(value)][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [value for _, value in found.values()]


def explain(error: BaseException) -> str:
    """Say what stands in the way of tracing, and the line outside torch where it does."""
    message = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "_local_scalar_dense" in message:
        message = "Python reads a tensor's value"
    line = _origin_of(error)
    return f"{message}, at {line}" if line else message


def _origin_of(error: BaseException) -> str | None:
    torch_folder = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(torch_folder)]
    if not outside:
        return None
    line = linecache.getline(outside[-1].filename, outside[-1].lineno or 0).strip()
    return f"{outside[-1].filename}:{outside[-1].lineno}, `{line}`"
