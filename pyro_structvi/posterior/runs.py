"""Runs of a model at a draw of its latent sites, and statistics of batch normalization at the draw."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Bernoulli

from pyro_structvi._checks import (
    check_no_nan,
    check_same_kind,
    check_shape,
    check_support,
    naming,
    shape_text,
    validates,
    warn_user,
)
from pyro_structvi._nested import nested_tensors
from pyro_structvi._torch import BatchOrInstanceNorm, inside_transform, take_apart
from pyro_structvi.linalg.matrices import at_least_single, autocast_off
from pyro_structvi.sites.autoguide import warn_of_local_latents
from pyro_structvi.sites.finding import (
    CountedWeight,
    check_runs_on_inputs,
    find_sites_by_running,
    in_evaluation,
    modules_of,
    naming_derivatives,
    separate_randomness,
)
from pyro_structvi.sites.report import trial_pass
from pyro_structvi.weights.site_role import SiteRole, SiteUse, sample_nodes
from pyro_structvi.weights.torch_distributions import base_of, in_single, tensors_of

_OF_EACH_EXAMPLE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # averaged
_MOST_MOVED = 0.5  # standard deviations from draw to draw, which running statistics still fit
_FEWEST, _MOST = 32, 256  # examples
_REMEDY = (
    "Pass `predict(..., batch_statistics=x)` with some hundred inputs of the training, or use a "
    "normalization without running statistics, such as `torch.nn.GroupNorm`."
)


class _AtDraw(Messenger):
    """Gives latent sites the values of a draw; observed sites keep theirs.

    With ``selects`` values are of all examples, and a plate with a given subsample takes those of its
    examples. A value of another shape is left out, since it may belong to a local latent of other
    examples. An unused site gets NaN in place of a sample; with ``counts`` other samples count their
    uses.
    """

    def __init__(
        self, values: Mapping[str, Tensor], unused: str | None, counts: bool, selects: bool
    ) -> None:
        super().__init__()
        self.values, self.unused = values, unused
        self.counts, self.selects = counts, selects
        self.given: dict[str, Tensor] = {}  # subsamples of plates

    def _pyro_sample(self, msg: Any) -> None:
        msg["infer"]["own_mask"] = msg["mask"]  # the model's, without masks of outer handlers
        if self.selects and site_is_subsample(msg) and msg["value"] is not None:
            self.given[msg["name"]] = torch.as_tensor(msg["value"])
        if msg["is_observed"]:
            return
        value = self._value_of(msg)
        if value is not None and value.shape == msg["fn"].shape():
            if value.is_leaf and value.is_floating_point() and not inside_transform():
                value.requires_grad_()  # as a parameter: a model may differentiate by its weights
            msg["value"], msg["is_observed"] = value, True
        elif msg["name"] == self.unused:
            msg["value"] = torch.tensor(torch.nan).expand(msg["fn"].shape())
        elif self.counts and msg["value"] is None and not site_is_subsample(msg):
            drawn = msg["fn"](*msg["args"], **msg["kwargs"])
            msg["value"] = CountedWeight(drawn, SiteUse(msg["name"]))

    def _value_of(self, msg: Any) -> Tensor | None:
        """Return the value of a site at the examples that its plates are given, in their order."""
        value = self.values.get(msg["name"])
        if value is None:
            return None
        for frame in msg["cond_indep_stack"]:
            dim = -msg["fn"].event_dim + (frame.dim if frame.vectorized else 0)
            if frame.name in self.given and value.shape[dim:][:1] == (frame.full_size,):
                msg["infer"]["is_selected"] = True
                value = value.index_select(dim, self.given[frame.name].to(value.device))
        return value


def run_at_draw(
    model: Callable[..., Any],
    values: dict[str, Tensor],
    args: tuple[Any, ...],
    new: Collection[str] = (),
    unused: str | None = None,
    counts: bool = False,
    selects: bool = False,
) -> Any:
    """Run the model at a draw of its latent sites without the ``new`` ones, and return the trace."""
    given = {name: value for name, value in values.items() if name not in new}
    try:
        with poutine.block(), poutine.mask(mask=False):
            return poutine.trace(_AtDraw(given, unused, counts, selects)(model)).get_trace(*args)
    except TypeError:
        check_runs_on_inputs(model, args)
        raise
    except RuntimeError as error:
        for index, value in enumerate(args if values else ()):
            if isinstance(value, Tensor) and value.is_floating_point():
                name, draw = next(iter(values.items()))
                try:
                    check_same_kind(f"x[{index}]" if len(args) > 1 else "x", value, name, draw)
                except ValueError as mismatch:
                    raise mismatch from error
        if values and not inside_transform():
            find_sites_by_running(model, args, {})  # which names integers in place of numbers
        raise


def is_unused(trace: Any, node: Any) -> bool:
    """Whether the model neither uses nor returns the value of a node of a counting run."""
    value = node["value"]
    returned, _ = take_apart(trace.nodes["_RETURN"]["value"])
    is_counted = isinstance(value, CountedWeight)
    return is_counted and value.use.count == 0 and not any(each is value for each in returned)


def find_observation(
    trace: Any, values: dict[str, Tensor], site: str | None, local: Collection[str] = ()
) -> str:
    """Return the name of the observed site of a model that ran at a draw without observations.

    The model may leave out ``local`` sites, as those in place of the observations that it lacked.
    """
    nodes = sample_nodes(trace)
    drawn = [name for name, node in nodes.items() if not node["is_observed"]]
    free = [name for name in drawn if name not in values]
    marked = [name for name in free if SiteRole.of(nodes[name]).is_observation]
    candidates = [name for name in free if name == site] if site else marked or free
    observed = str(candidates[0]) if len(candidates) == 1 else ""
    plates = _plates_of(nodes[observed]) if observed else set()
    missing = [
        name
        for name in (drawn if observed else ())
        if name not in (observed, *marked) and not plates & _plates_of(nodes[name])
    ]
    for name in missing:
        if name in values:
            raise ValueError(
                f"`posterior` must give the site '{name}' values of the model's shape "
                f"{shape_text(nodes[name]['fn'].shape())}, but got {shape_text(values[name].shape)}."
            )
    unknown = [name for name in values if name not in nodes and name not in local]
    if missing or unknown:
        raise ValueError(
            "`posterior` must have the latent sites of the model, but these are missing in it: "
            f"{missing}, and these are not in the model: {unknown}. Pass the guide of this very "
            "model, or rename the draws."
            + (' Mark observations by `infer={"is_observation": True}`.' if missing else "")
        )
    given = [name for name in nodes if name not in values]
    if given and not free:
        raise ValueError(
            f"The model must sample its observations where it predicts, but was given those of {given}. "
            "Leave them out of the inputs: `predict(model, posterior, x, y=y)`; a loader has "
            "mini-batches `x` or `(x, y)`. A `pyro.factor` predicts nothing."
        )
    if not free:
        raise ValueError(
            f"`posterior` must have draws of latent sites only, but has those of all sites, {[*nodes]}. "
            "Leave the observations out."
        )
    if not observed:
        raise ValueError(
            f"The observed site must be one of {free}"
            + (f", but got `site='{site}'`." if site else ": pass its name as `site=`.")
        )
    return observed


def check_whole(observed: Any, args: tuple[Any, ...]) -> None:
    """Raise a ``ValueError`` if a plate of the observations takes a random part of the examples."""
    size = next((len(value) for value in nested_tensors(args) if value.dim()), None)
    for frame in observed["cond_indep_stack"]:
        if frame.size < (frame.full_size or 0) and size not in (None, frame.size):
            raise ValueError(
                f"The plate '{frame.name}' of the observations takes {frame.size} of {size} examples by "
                "chance, others at each draw. Let the model take a part of its data only if it has "
                "observations, or let it take whole mini-batches."
            )


def _plates_of(node: Any) -> set[str]:
    return {frame.name for frame in node["cond_indep_stack"] if frame.vectorized}


def sites_from_model(
    trace: Any, observed: Any, values: Mapping[str, Tensor], is_whole: bool
) -> set[str]:
    """Return the local latent sites of a draw that must be sampled from the model, and warn of them.

    There are none if the run had all examples, ``is_whole``, and the posterior was fitted to as many.
    """
    plates = _plates_of(observed)
    found = [name for name in values if name in trace.nodes]
    local = [name for name in found if plates & _plates_of(trace.nodes[name])]
    kept = [name for name in local if is_whole and trace.nodes[name]["is_observed"]]
    new = [name for name in local if name not in kept]
    warn_of_local_latents(
        [name for name in kept if "is_selected" not in trace.nodes[name]["infer"]], new
    )
    return {*new}


def observed_log_prob(node: Any, y: Tensor) -> Tensor:
    """Return the log density of observations in at least single precision, zero where masked."""
    likelihood, mask = in_single(node["fn"]), node["infer"]["own_mask"]
    shape = likelihood.batch_shape + likelihood.event_shape
    y = checked_observations(y, likelihood, shape)
    with autocast_off(y):
        log_density: Tensor = scale_and_mask(likelihood.log_prob(y), mask=mask)
    return log_density


def observed_elements(node: Any, y: Tensor) -> Tensor | None:
    """Return which elements of observations count, ``(N, *event)``; None if the model masks none."""
    masks, part = [(node["infer"]["own_mask"], node["fn"].event_dim)], node["fn"]
    while part is not None:  # the base of a distribution of Pyro may be one of torch
        mask = getattr(part, "_mask", None)  # of a MaskedDistribution
        masks.append((mask, len(part.event_shape)))
        part = getattr(part, "base_dist", None)
    seen = None
    for mask, event_dim in masks:
        if mask is not None and mask is not True:
            own = torch.as_tensor(mask, device=y.device)
            own = own.reshape(*own.shape, *[1] * event_dim).expand(y.shape)
            seen = own if seen is None else seen & own
    return seen


def checked_observations(y: Tensor, likelihood: Any, shape: Sequence[int]) -> Tensor:
    """Check observations of a likelihood, and return them in the dtype that it takes."""
    check_no_nan("y", y)
    check_shape("y", y, shape, "that of the predictions")
    y = at_least_single(y)
    if not likelihood.support.is_discrete:
        own = next((each for each in tensors_of(likelihood) if each.is_floating_point()), None)
        if own is not None:
            check_same_kind("y", y, "prediction.mean", own)
    elif isinstance(base_of(likelihood), Bernoulli):
        y = y.to(likelihood.mean)  # torch needs labels in the dtype of the probabilities
    if validates(None) and not (y.is_meta or inside_transform()):
        check_support("y", y, likelihood.support)
    return y


@contextmanager
def evaluation_mode(model: Any, differentiable: bool = False) -> Iterator[None]:
    """Run a block in evaluation mode, without gradients unless ``differentiable``."""
    with_gradients = differentiable and torch.is_grad_enabled()
    with (
        naming_derivatives(),
        in_evaluation(modules_of(model)),
        torch.set_grad_enabled(with_gradients),
    ):
        yield


# ---- batch normalization -------------------------------------------------------------------------


class SharedStatisticsWarning(UserWarning):
    """Running statistics of batch or instance normalization are averages over different draws."""


class BatchStatistics:
    """Mean and variance of the inputs of batch or instance normalization, measured at a draw.

    Running statistics are averages over draws, and fit none whose features differ, as of an ensemble.
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
        with self.used(found, measures=True), naming("batch_statistics", self.args):
            run(self.args)
        return found

    @contextmanager
    def used(self, found: dict[str, Tensor], measures: bool = False) -> Iterator[None]:
        """Let the layers use measured statistics in this block, or measure them first."""

        def hook(number: int, calls: Iterator[int], layer: Any, args: Any, kwargs: Any) -> None:
            name = f"{number}.{next(calls)}"
            if measures:
                inputs: Tensor = [*args, *kwargs.values()][0]
                dims = [dim for dim in range(inputs.dim()) if dim != 1]
                mean, variance = inputs.mean(dims), inputs.var(dims, correction=0)
                if isinstance(layer, _OF_EACH_EXAMPLE):
                    variance = inputs.var(dims[1:], correction=0).mean(0)
                found[f"{name}.mean"] = mean.to(layer.running_mean.dtype)
                found[f"{name}.variance"] = variance.to(layer.running_var.dtype)
            _set_statistics(layer, found[f"{name}.mean"], found[f"{name}.variance"])

        with ExitStack() as handles:
            for number, layer in enumerate(self._layers):
                handles.callback(_set_statistics, layer, layer.running_mean, layer.running_var)
                own = partial(hook, number, count())
                handle = layer.register_forward_pre_hook(own, with_kwargs=True)
                handles.callback(handle.remove)
            yield


def warn_of_shared_statistics(model: Callable[..., Any]) -> None:
    """Warn if members of an ensemble share running statistics in a model."""
    if layers := _running_layers(model):
        warn_user(
            f"The members of this ensemble share the running statistics of {len(layers)} "
            f"normalizations, which are averages over members and fit none of them. {_REMEDY}",
            SharedStatisticsWarning,
        )


def warn_of_averaged_statistics(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Warn if running statistics of a model are averages over draws that differ much."""
    layers, moved = _running_layers(model), 0
    if all(isinstance(each, Tensor) for each in args):
        args = tuple(each[:_MOST] for each in args)
    if layers and len(next(nested_tensors(args), ())) >= _FEWEST:
        # Where a weight has more uses than in training, only the passes of a training raise.
        with suppress(RuntimeError), separate_randomness():
            moved = _count_moved(model, guide, args, layers)
    if moved:
        warn_user(
            f"The running statistics of {moved} normalizations are averages over draws of the weights "
            "and fit none of them: from draw to draw the means of their inputs move by more than half a "
            f"standard deviation. Layers directly before them need no bias (`bias=False`). {_REMEDY}",
            SharedStatisticsWarning,
        )


def _count_moved(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple[Any, ...], layers: list[Any]
) -> int:
    """Count the normalizations whose inputs have other means in each of a few passes of training.

    Noise of sampled outputs averages out over the examples.
    """
    statistics = BatchStatistics(model, args)
    passes = [statistics.measure(lambda x: trial_pass(model, guide, *x)) for _ in range(3)]
    moved = set()
    for name in passes[0]:
        number, _, moment = name.split(".")
        layer = layers[int(number)]
        between = torch.stack([each[name] for each in passes]).var(0)
        share = (between / (layer.running_var + layer.eps)).mean()
        if moment == "mean" and share > _MOST_MOVED**2:
            moved.add(number)
    return len(moved)


def _running_layers(model: Callable[..., Any]) -> list[Any]:
    layers = (layer for layer in modules_of(model) if isinstance(layer, BatchOrInstanceNorm))
    return [layer for layer in layers if layer.running_mean is not None]


def _set_statistics(layer: nn.Module, mean: Tensor, variance: Tensor) -> None:
    # PyroModule's own assignment takes no tensors of a vmap.
    nn.Module.__setattr__(layer, "running_mean", mean)
    nn.Module.__setattr__(layer, "running_var", variance)
