"""Statistics of batch normalization at each draw, in place of running ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import count
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.distributions.constraints import is_dependent
from torch.nn.modules.module import register_module_forward_hook

from pyro_structvi._checks import naming, warn_user
from pyro_structvi._torch import take_apart
from pyro_structvi.posterior.draws import Draws, Posterior, as_arguments
from pyro_structvi.posterior.runs import (
    find_observation,
    is_unused,
    left_to_the_model,
    modules_of,
    run_at_draw,
    tensors_in,
)
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sites.joint_posterior import are_plain, in_one_pass, stack_draws
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.ensemble import SameMember
from pyro_structvi.weights.lazy import as_drawn

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


Values = dict[str, Tensor]
Batch = tuple[tuple[Any, ...], Tensor | None]
Read = Callable[[Any, Any, Tensor | None], Values]


@dataclass(frozen=True)
class Pass:
    """Several draws at one mini-batch.

    Attributes:
        batch: The number of the mini-batch.
        values: The draws, ``(draws, *shape)`` by site, without what is drawn from the model.
        outputs: What was read, ``(draws, *shape)`` by name.
    """

    batch: int
    values: Values
    outputs: Values


class Passes:
    """Runs of a model at draws of a posterior, several draws in a pass.

    The first draw runs by itself: it tells what is left to the model, and how much memory a draw takes.
    The others run together by :func:`torch.func.vmap`, under which nothing can be validated. Where an
    argument or an observation is not what its distribution takes, the draws of a pass are run again, one
    by one, so that errors are the usual ones; and so is, from then on, what torch cannot vectorize.

    Args:
        model: The model.
        posterior: A guide, or draws by site.
        batches: Mini-batches: the model's arguments, and observations or None.
        site: The observed site's name, where it cannot be told from the model.
        read: What to keep of a run, by name, of the trace's node of the observation, the model's return
            value, and the observations.
        max_memory: How much the weights and layers' outputs of draws in one pass may take, in GiB.
        statistics: What batch normalization uses at each draw; its running statistics when None.

    Attributes:
        observed: The name of the observed site, after the first pass.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        posterior: Posterior,
        batches: Sequence[Batch],
        site: str | None,
        read: Read,
        max_memory: float,
        statistics: BatchStatistics | None = None,
    ) -> None:
        self._statistics = statistics
        self._model, self._posterior, self._batches = model, posterior, batches
        self._site, self._read, self._max_bytes = site, read, max_memory * 2**30
        self._new: set[str] = set()
        self._unused: str | None = None
        self._in_turn = False
        self.observed = ""

    def run(self, total: int) -> Iterator[Pass]:
        """Yield the passes of so many draws: those of some draws at all mini-batches before the next."""
        draws = Draws(self._posterior, total, self._batches[0][0])
        first = draws.take(1)
        with counted_bytes() as layers:
            met = self._measure(first)
            outputs = self._run_first(first, met)
        yield Pass(0, self._kept(first), outputs)
        yield from self._run_batches(first, met, 1)
        weights = _bytes_of(first)
        at_once = self._fitting(weights)  # whatever the inputs: a seed then gives the same draws
        in_pass = self._fitting(weights + sum(layers) + _bytes_of(outputs))
        while draws.left:
            for part in _split(draws.take(min(at_once, draws.left)), in_pass):
                yield from self._run_batches(part, self._measure(part))

    def _kept(self, values: Values) -> Values:
        return {name: value for name, value in values.items() if name not in self._new}

    def _fitting(self, bytes_each: int) -> int:
        return max(1, int(self._max_bytes / max(1, bytes_each)))

    def _run_batches(self, values: Values, met: Values, start: int = 0) -> Iterator[Pass]:
        for batch in range(start, len(self._batches)):
            yield Pass(batch, self._kept(values), self._run(values, met, batch))

    def _measure(self, values: Values) -> Values:
        """Return statistics of batch normalization at draws, ``(draws, ...)``, if they are asked for."""
        if self._statistics is None:
            return {}
        if _count(values) > 1 and not self._in_turn:
            measured = in_one_pass(self._measure_one, values)
            if measured is not None:
                return measured
            self._in_turn = True
        return stack_draws([self._measure_one(_only(one)) for one in _split(values, 1)])

    def _measure_one(self, values: Values) -> Values:
        assert self._statistics is not None
        run = partial(run_at_draw, self._model, values, new=self._new, unused=self._unused)
        return self._statistics.measure(run)

    def _run_first(self, values: Values, met: Values) -> Values:
        """Run one draw, and again if that shows latents that are left to the model."""
        own = _only(values)
        self._in_turn = not are_plain([
            *own.values(),
            *self._batches[0][0],
            *tensors_in(self._model),
        ])
        with separate_randomness():  # it draws what the others leave out
            trace, node = self._trace(own, _only(met), 0, counts=True)
        self._unused = self.observed if is_unused(trace, node) else None
        self._new = left_to_the_model(trace, node, own, len(self._batches) == 1)
        return self._run(values, met, 0) if self._new else _stacked(self._outputs(trace, node, 0))

    def _run(self, values: Values, met: Values, batch: int) -> Values:
        """Run draws together where that can be, else one by one."""
        if _count(values) > 1 and not self._in_turn:
            together = self._run_together(values, met, batch)
            if together is None:
                self._in_turn = True
            elif together[1].all():
                return together[0]
        mets = _split(met, 1) if met else [met] * _count(values)
        draws = zip(_split(values, 1), mets, strict=True)
        each = (self._trace(_only(one), _only(own), batch) for one, own in draws)
        runs = [_stacked(self._outputs(*pair, batch)) for pair in each]
        return {name: torch.cat([run[name] for run in runs]) for name in runs[0]}

    def _run_together(
        self, values: Values, met: Values, batch: int
    ) -> tuple[Values, Tensor] | None:
        """Run draws in one pass, and say of each whether it is valid; None where torch cannot."""

        def run(own: tuple[Values, Values]) -> tuple[Values, Tensor]:
            trace, node = self._trace(*own, batch)
            is_valid = _is_valid(trace, node, self._batches[batch][1])
            return self._outputs(trace, node, batch), is_valid

        return in_one_pass(run, (values, met))

    def _trace(
        self, values: Values, met: Values, batch: int, counts: bool = False
    ) -> tuple[Any, Any]:
        """Run the model at a draw; return the trace, and its node of the observation."""
        args, _ = self._batches[batch]
        with self._statistics.used(met) if self._statistics else nullcontext():
            trace = run_at_draw(self._model, values, args, self._new, self._unused, counts)
        self.observed = find_observation(trace, values, self._site)
        return trace, trace.nodes[self.observed]

    def _outputs(self, trace: Any, node: Any, batch: int) -> Values:
        returned = as_drawn(trace.nodes["_RETURN"]["value"])
        return self._read(node, returned, self._batches[batch][1])


def _is_valid(trace: Any, observed: Any, y: Tensor | None) -> Tensor:
    """Whether what is drawn from the model has valid arguments, and its observations are possible."""
    drawn = [
        node["fn"]
        for node in trace.nodes.values()
        if node["type"] == "sample" and not node["is_observed"] and not site_is_subsample(node)
    ]
    checks = [check for distribution in drawn for check in _checks_of(distribution)]
    if y is not None:
        checks.append(observed["fn"].support.check(y).all())
    return reduce(torch.logical_and, checks) if checks else torch.tensor(True)


def _checks_of(distribution: Any) -> Iterator[Tensor]:
    """Yield whether the arguments of a distribution and its parts obey their constraints."""
    for name, constraint in distribution.arg_constraints.items():
        is_given = name in vars(distribution)
        if is_given and not is_dependent(constraint):
            yield constraint.check(getattr(distribution, name)).all()
    for value in vars(distribution).values():
        if isinstance(value, Distribution):
            yield from _checks_of(value)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes of the outputs of all modules that run in this block."""
    found: list[int] = []

    def count(module: Any, args: Any, outputs: Any) -> None:
        found.append(_bytes_of(dict(enumerate(take_apart(outputs)[0]))))

    handle = register_module_forward_hook(count)
    try:
        yield found
    finally:
        handle.remove()


def _bytes_of(values: Mapping[Any, Any]) -> int:
    tensors = (value for value in values.values() if isinstance(value, Tensor))
    return sum(value.numel() * value.itemsize for value in tensors)


def _count(values: Values) -> int:
    return len(next(iter(values.values())))


def _split(values: Values, size: int) -> list[Values]:
    """Return stacked draws in parts of a size."""
    parts = {name: value.split(size) for name, value in values.items()}
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def _only(values: Values) -> Values:
    """Return the one draw that is stacked."""
    return {name: value.squeeze(0) for name, value in values.items()}


def _stacked(values: Values) -> Values:
    return {name: value.unsqueeze(0) for name, value in values.items()}
