"""Statistics of batch normalization at each draw, in place of running statistics."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn

from pyro_structvi._checks import naming, warn_user
from pyro_structvi.posterior.runs import modules_of

_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SharedStatisticsWarning(UserWarning):
    """Members of an ensemble share the running statistics of batch normalization."""


class BatchStatistics:
    """Mean and variance of the inputs of batch normalization, measured at a draw.

    Running statistics are averages over the draws of training. They fit no member of an ensemble, whose
    features differ.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.args, self._layers = args, _running_layers(model)
        if not self._layers:
            raise ValueError(
                "`batch_statistics` is for models with batch normalization that has running statistics, "
                "but got one without. Leave it out."
            )

    def measure(self, run: Callable[..., Any]) -> dict[str, Tensor]:
        """Run the model at a draw on the reference inputs; return statistics by layer and call."""
        found: dict[str, Tensor] = {}

        def act(name: str, layer: Any, inputs: Tensor) -> None:
            dims = [dim for dim in range(inputs.dim()) if dim != 1]
            mean = inputs.mean(dims).to(layer.running_mean.dtype)
            variance = inputs.var(dims, correction=0).to(layer.running_var.dtype)
            found.update({f"{name}.mean": mean, f"{name}.variance": variance})
            _set_statistics(layer, mean, variance)

        with self._before_each(act), naming("batch_statistics", self.args):
            run(self.args)
        return found

    @contextmanager
    def used(self, found: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the layers use measured statistics in this block."""

        def act(name: str, layer: nn.Module, inputs: Tensor) -> None:
            _set_statistics(layer, found[f"{name}.mean"], found[f"{name}.variance"])

        with self._before_each(act):
            yield

    @contextmanager
    def _before_each(self, act: Callable[[str, nn.Module, Tensor], None]) -> Iterator[None]:
        """Call a function before each call of a layer, and restore running statistics afterwards."""

        def hook(
            number: int, calls: Iterator[int], layer: nn.Module, args: tuple[Any, ...]
        ) -> None:
            act(f"{number}.{next(calls)}", layer, args[0])

        with ExitStack() as handles:
            for number, layer in enumerate(self._layers):
                handles.callback(_set_statistics, layer, layer.running_mean, layer.running_var)
                handle = layer.register_forward_pre_hook(partial(hook, number, count()))
                handles.callback(handle.remove)
            yield


def warn_of_shared_statistics(model: Callable[..., Any]) -> None:
    """Warn if members of an ensemble share running statistics in a model."""
    if layers := _running_layers(model):
        warn_user(
            f"The members of this ensemble share the running statistics of {len(layers)} batch "
            "normalizations, which are averages over members and fit none of them. Pass "
            "`predict(..., batch_statistics=x)` with some hundred inputs of the training, or use a "
            "normalization without running statistics, such as `torch.nn.GroupNorm`.",
            SharedStatisticsWarning,
        )


def _running_layers(model: Callable[..., Any]) -> list[Any]:
    layers = (layer for layer in modules_of(model) if isinstance(layer, _LAYERS))
    return [layer for layer in layers if layer.running_mean is not None]


def _set_statistics(layer: nn.Module, mean: Tensor, variance: Tensor) -> None:
    # PyroModule's own assignment takes no tensors of a vmap.
    nn.Module.__setattr__(layer, "running_mean", mean)
    nn.Module.__setattr__(layer, "running_var", variance)
