"""Operations of optimizers and LSTMs in terms that a record holds."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_structvi._torch import signature_of
from pyro_structvi._torch_steps import (
    FUSED_ADAM,
    FUSED_ADAMW,
    NORMS_OF_SEVERAL,
)

LSTM = torch.ops.aten.mkldnn_rnn_layer.default
LSTM_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


def make_explicit(graph: fx.Graph) -> None:
    """Let layers of LSTMs do in any record what they do in torch's own steps, of which nothing tells.

    A layer leaves out what its gradients need where torch records no gradients, and takes the numbers of
    its inputs as they lie, so all is wrong for one that is not contiguous. A compiler may choose such.

    Args:
        graph: Operations of torch's dispatcher, changed in place.
    """
    own: Any = torch.ops.pyro_structvi
    explicit = {LSTM: own.lstm_layer.default, LSTM_BACKWARD: own.lstm_layer_backward.default}
    for node in graph.nodes:
        node.target = explicit.get(node.target, node.target)


def _with_workspace(*args: Any) -> Any:
    with torch.enable_grad():
        return LSTM(*_contiguous(*args))


def _backward(*args: Any) -> Any:
    return LSTM_BACKWARD(*_contiguous(*args))


def _contiguous(*args: Any) -> Iterator[Any]:
    for value in args:
        yield value.detach().contiguous() if isinstance(value, Tensor) else value


for name, run, original in (
    ("pyro_structvi::lstm_layer", _with_workspace, LSTM),
    ("pyro_structvi::lstm_layer_backward", _backward, LSTM_BACKWARD),
):
    torch.library.define(name, signature_of(original))
    torch.library.impl(name, "CPU", run)
    torch.library.register_fake(name, run)


def is_elementary(graph: fx.Graph) -> bool:
    """Whether a compiler takes all fused updates in a graph, once they are written out."""
    fused = [node.target for node in graph.nodes if "_fused_" in str(node.target)]
    return all(target in (*FUSED_ADAM, *FUSED_ADAMW) for target in fused)


def make_elementary(graph: fx.Graph) -> None:
    """Write out updates of fused Adam and AdamW, and norms of several tensors.

    Torch's fused optimizers tell compilers nothing of themselves, so that no compiler takes them.

    Args:
        graph: Operations of torch's dispatcher, changed in place.
    """
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def recorded(node: fx.Node) -> Any:
        return fx.Proxy(node, tracer)

    for node in list(graph.nodes):
        if node.target is NORMS_OF_SEVERAL:
            _norms(graph, node, *node.args)
        elif node.target in (*FUSED_ADAM, *FUSED_ADAMW):
            with graph.inserting_before(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), recorded)
                _adam(
                    *args,
                    **kwargs,
                    decoupled=node.target in FUSED_ADAMW,
                    dtype=_dtype(node.args[0]),
                )
            graph.erase_node(node)


def _norms(graph: fx.Graph, node: fx.Node, tensors: Any, order: float = 2.0) -> None:
    """Let each norm of several tensors be an operation of its own, which reads what made its tensor."""
    norm = torch.ops.aten.linalg_vector_norm.default
    for user in list(node.users):
        with graph.inserting_before(user):
            own = graph.call_function(norm, (tensors[user.args[1]], order))
        user.replace_all_uses_with(own)
        graph.erase_node(user)
    graph.erase_node(node)


def _dtype(parameters: Sequence[fx.Node]) -> torch.dtype:
    dtype: torch.dtype = parameters[0].meta["val"].dtype
    return dtype


def _adam(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    averages: Sequence[Any],
    squares: Sequence[Any],
    largest: Sequence[Any],
    steps: Sequence[Any],
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
    decoupled: bool,
    dtype: torch.dtype,
) -> None:
    """Record Adam (Kingma and Ba 2015, Algorithm 1) or AdamW for parameters of one dtype."""
    counts = torch.stack([step.double() for step in steps])
    decays = [(counts * (math.log(beta) if beta else -math.inf)).exp() for beta in (beta1, beta2)]
    sizes, roots = ((lr / (1 - decays[0])).to(dtype), (1 - decays[1]).sqrt().to(dtype))
    for number, parameter in enumerate(parameters):
        gradient = gradients[number] if grad_scale is None else gradients[number] / grad_scale
        gradient = -gradient if maximize else gradient
        start = parameter
        if weight_decay and decoupled:
            start = parameter - parameter * (lr * weight_decay)
        elif weight_decay:
            gradient = gradient + weight_decay * parameter
        average = averages[number] + (1 - beta1) * (gradient - averages[number])
        square = beta2 * squares[number] + (1 - beta2) * gradient * gradient
        new = [(averages[number], average), (squares[number], square)]
        if amsgrad:
            square = torch.maximum(largest[number], square)
            new.append((largest[number], square))
        move = sizes[number] * average / (square.sqrt() / roots[number] + eps)
        for old, value in (*new, (parameter, start - move)):
            old.copy_(value if found_inf is None else torch.where(found_inf == 1, old, value))
