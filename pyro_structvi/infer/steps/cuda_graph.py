"""A function of tensors as one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_structvi.infer.steps.traced import Outputs


class CUDAGraph:
    """A function of tensors, captured once and replayed with other values.

    Args:
        function: From tensors to tensors.
        inputs: Tensors of the shapes of all that will come.
    """

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Outputs], inputs: Sequence[Tensor]
    ) -> None:
        self._inputs = [value.detach().clone() for value in inputs]
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # of this device; torch's own is of the first that captured
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """Replay with these inputs; the results are overwritten by the next call."""
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._outputs
