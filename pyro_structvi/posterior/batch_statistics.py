"""Statistics of batch normalization at each draw, in place of running ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn

from pyro_structvi._checks import naming, warn_user
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.guides.same_member import SameMember
from pyro_structvi.posterior.draws import Posterior, as_arguments
from pyro_structvi.posterior.runs import modules_of

LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SharedStatisticsWarning(UserWarning):
    """Members of an ensemble share the running statistics of batch normalizations."""


class BatchStatistics:
    """Mean and variance that batch normalization meets when a model runs at a draw on given inputs.

    Running statistics are averages over the draws of the training. Those of one draw differ from them,
    and of members of an ensemble, which have other features each, they are those of none.

    Args:
        model: The model.
        args: Its arguments, whose examples tell the statistics.

    Raises:
        ValueError: If the model has no batch normalization with running statistics.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.args, self._layers = args, running_layers(model)
        if not self._layers:
            raise ValueError(
                "`batch_statistics` is for models with batch normalization that has running statistics, "
                "but got one without. Leave it out."
            )

    def measure(self, run: Callable[..., Any]) -> dict[str, Tensor]:
        """Return what the layers meet on the inputs, by the layer and its call.

        Args:
            run: Runs the model at a draw with the arguments it is given.
        """
        met: dict[str, Tensor] = {}

        def act(name: str, layer: nn.Module, inputs: Tensor) -> None:
            mean, variance = _statistics_of(layer, inputs)
            met.update({f"{name}.mean": mean, f"{name}.variance": variance})
            _use(layer, mean, variance)

        with self._before_each(act), naming("batch_statistics", self.args):
            run(self.args)
        return met

    @contextmanager
    def used(self, met: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the layers use in this block what was measured."""

        def act(name: str, layer: nn.Module, inputs: Tensor) -> None:
            _use(layer, met[f"{name}.mean"], met[f"{name}.variance"])

        with self._before_each(act):
            yield

    @contextmanager
    def _before_each(self, act: Callable[[str, nn.Module, Tensor], None]) -> Iterator[None]:
        """Call a function before each call of a layer; running statistics stay as they were."""
        own = [(layer, layer.running_mean, layer.running_var) for layer in self._layers]
        calls = [count() for _ in self._layers]

        def hook(number: int, layer: nn.Module, args: tuple[Any, ...]) -> None:
            act(f"{number}.{next(calls[number])}", layer, args[0])

        with ExitStack() as handles:
            for number, (layer, mean, variance) in enumerate(own):
                handles.callback(_use, layer, mean, variance)
                handles.callback(layer.register_forward_pre_hook(partial(hook, number)).remove)
            yield


def running_layers(model: Callable[..., Any]) -> list[Any]:
    """Return the batch normalizations of a model that have running statistics."""
    layers = (layer for layer in modules_of(model) if isinstance(layer, LAYERS))
    return [layer for layer in layers if layer.running_mean is not None]


def statistics_for(
    model: Callable[..., Any], posterior: Posterior, x: Any
) -> BatchStatistics | None:
    """Return the statistics that a caller asked for; without, warn where members share running ones.

    Args:
        model: The model.
        posterior: What it is run at.
        x: Inputs whose statistics are to be used, or None.
    """
    if x is not None:
        return BatchStatistics(model, as_arguments(x, "batch_statistics"))
    is_ensemble = isinstance(posterior, StructuredGuide) and any(
        isinstance(part, SameMember) for part in posterior.modules()
    )
    if is_ensemble and (layers := running_layers(model)):
        warn_user(
            f"The members of this ensemble share the running statistics of {len(layers)} batch "
            "normalizations, which are averages over members and fit none of them. Pass "
            "`predict(..., batch_statistics=x)` with some hundred inputs of the training, or use a "
            "normalization without running statistics, such as `torch.nn.GroupNorm`.",
            SharedStatisticsWarning,
        )
    return None


def _statistics_of(layer: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of each channel, as batch normalization has them in training."""
    others = [dim for dim in range(inputs.dim()) if dim != 1]
    mean, variance = inputs.mean(others), inputs.var(others, correction=0)
    return mean.to(layer.running_mean.dtype), variance.to(layer.running_var.dtype)


def _use(layer: nn.Module, mean: Tensor, variance: Tensor) -> None:
    """Put statistics in the place of a layer's; past Pyro, which takes no tensors of a vmap."""
    nn.Module.__setattr__(layer, "running_mean", mean)
    nn.Module.__setattr__(layer, "running_var", variance)
