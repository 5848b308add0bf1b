"""LSTMs in single precision on a CPU, in a record that is run without autograd."""

from typing import Any

import torch
from torch import Tensor, fx

LSTM = torch.ops.aten.mkldnn_rnn_layer.default


def keep_workspaces(graph: fx.Graph) -> None:
    """Let layers of LSTMs return what their gradients need, also where torch records no gradients.

    That is the operation's fourth result, which it leaves out there, without a word in its signature.

    Args:
        graph: Operations of torch's dispatcher, changed in place.
    """
    for node in graph.nodes:
        if node.target is LSTM:
            node.target = torch.ops.pyro_structvi.lstm_layer.default


def has_lstm_layers(graph: fx.Graph) -> bool:
    """Whether a record has layers of LSTMs in it, some of whose gradients inductor gets wrong."""
    return any(node.target is torch.ops.pyro_structvi.lstm_layer.default for node in graph.nodes)


def _with_workspace(*args: Any) -> Any:
    with torch.enable_grad():
        return LSTM(*(value.detach() if isinstance(value, Tensor) else value for value in args))


torch.library.define(
    "pyro_structvi::lstm_layer",
    "(Tensor x, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor h, Tensor c, bool reverse, "
    "int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("pyro_structvi::lstm_layer", "CPU", _with_workspace)
torch.library.register_fake("pyro_structvi::lstm_layer", _with_workspace)
