"""LSTMs in single precision on a CPU, in a record that is run without autograd, or compiled."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from pyro_structvi._torch import signature_of

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
