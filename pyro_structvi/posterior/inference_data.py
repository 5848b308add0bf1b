"""Inference data for ArviZ 0.23 and 1.x."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._checks import Count, Positive, Program, check, checked, shape_text
from pyro_structvi._pyro import ONE_THREAD, declared_name, declared_samples
from pyro_structvi._torch import take_apart
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.nn.conversion import layout_of, parametrized
from pyro_structvi.nn.priors import matching
from pyro_structvi.posterior.passes import (
    Passes,
    Posterior,
    Values,
    as_arguments,
    as_batches,
    check_posterior,
    count_draws,
    spaced,
)
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob
from pyro_structvi.sites.finding import modules_of
from pyro_structvi.weights.torch_distributions import base_of


def import_arviz() -> Any:
    """Import ArviZ without its announcement of the next version."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        try:
            import arviz
        except ModuleNotFoundError as error:
            raise ImportError(
                'ArviZ is needed: `pip install "pyro-structvi[diagnostics]"`.'
            ) from error
    return arviz


def pareto_smoothed(log_weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return log weights smoothed by a generalized Pareto distribution, and the shape of their tail."""
    arviz = import_arviz()
    if hasattr(arviz, "psislw"):
        smoothed, k_hat = arviz.psislw(log_weights)
    else:  # ArviZ 1.x takes minus the log weights
        array_stats = import_module("arviz_stats.base").array_stats
        smoothed, k_hat = array_stats.psislw(-log_weights)
    return np.asarray(smoothed), float(k_hat)


class _Columns:
    """Arrays by name, appended some draws at a time."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values ``(draws, *shape)``."""
        for name, value in values.items():
            parts = self.parts.setdefault(name, [])
            parts.append(_as_array(value))
            if parts[-1].shape[1:] != parts[0].shape[1:]:
                raise ValueError(
                    f"`functions[{name!r}]` must return the same shape for each draw, but got "
                    f"{shape_text(parts[0].shape[1:])} and {shape_text(parts[-1].shape[1:])}."
                )

    def by_chain(self, chains: int) -> dict[str, Any]:
        """Return arrays ``(chain, draw, *shape)``."""
        joined = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        return {name: each.reshape(chains, -1, *each.shape[1:]) for name, each in joined.items()}


def _chosen(
    values: Values, outputs: Values, observed: str, sites: Sequence[str] | None, functions: Any
) -> Values:
    """Return the values of chosen sites, given draws of all sites; check all names."""
    taken = {*values, observed}
    for name in (*outputs, *functions):
        if name in taken:
            raise ValueError(
                f"`functions` and `outputs` must have new names, but '{name}' is a site of the model, "
                "or its outputs. Rename the function, or leave `outputs` out."
            )
        taken.add(name)
    patterns = ["*"] if sites is None else sites
    chosen = {name for each in patterns for name in matching(each, values, "sites", "sites")}
    return {name: value for name, value in values.items() if name in chosen}


def _values_of(functions: Mapping[str, Any], draw: Values) -> Values:
    """Return the values of functions of one draw, stacked with no other."""
    found = {}
    for name, function in functions.items():
        try:
            found[name] = function(draw)
        except Exception as error:
            error.add_note(f"`functions[{name!r}]` was called with a draw of the sites {[*draw]}.")
            raise
        check(f"functions[{name!r}](draw)", found[name], Tensor)
    return {name: value[None] for name, value in found.items()}


def _as_array(values: Tensor) -> Any:
    """Return a copy on the host, in float64 if values are real."""
    array = at_least_single(values.detach()).cpu().numpy()
    return array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else array.dtype)


def _without_units(values: Any, lead: int) -> Any:
    """Drop the dimensions after the first ``lead`` if they have one element."""
    return values.reshape(values.shape[:lead] if prod(values.shape[lead:]) == 1 else values.shape)


def dims_of_sites(
    model: Callable[..., Any], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    """Return names for the dimensions of declared sites, numbered if there are several of a kind."""
    found = {}
    modules = modules_of(model)
    computed = parametrized(modules)
    for module in modules:
        owner = computed.get(id(module), module)
        for attribute in declared_samples(module) if isinstance(module, PyroModule) else ():
            name, own = declared_name(module, attribute), attribute if owner is module else "weight"
            kinds = _kinds(owner, own, torch.Size(shapes.get(name, ())))
            numbers = [f"_{kinds[:at].count(kind)}" for at, kind in enumerate(kinds)]
            if kinds:
                found[name] = [
                    f"{name}_{kind}{number if kinds.count(kind) > 1 else ''}"
                    for kind, number in zip(kinds, numbers, strict=True)
                ]
    return found


def dims_like(
    name: str, shape: Sequence[int], known: Sequence[str], known_shape: Sequence[int]
) -> list[str]:
    """Return names for dimensions, known names as long as sizes agree, numbers after that."""
    pairs = zip(shape, known_shape[: len(known)], strict=False)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return [*known[:shared], *(f"{name}_dim_{number}" for number in range(len(shape) - shared))]


def _kinds(module: nn.Module, attribute: str, shape: torch.Size) -> list[str]:
    """Return the kind of each dimension of a weight or bias; empty if unknown."""
    if len(shape) == 1 and ("weight" in attribute or "bias" in attribute):
        return ["out"]
    layout = layout_of(module, shape)
    if layout.input_dim is None or "weight" not in attribute:
        return []
    further = "in" if isinstance(module, nn.Bilinear) else "kernel"
    leading = ["in", "out"] if layout.input_dim == 0 else ["out", "in"]
    return [*leading, *(further for _ in shape[2:])]


@checked
def to_inference_data(
    model: Program,
    posterior: Posterior,
    x: Any,
    y: Tensor,
    num_samples: Count | None = None,
    *,
    sites: Sequence[str] | None = None,
    functions: Mapping[str, Program] | None = None,
    outputs: bool = False,
    site: str | None = None,
    max_memory: Positive = 1 / 32,
    batch_statistics: Any = None,
) -> Any:
    """Draw from a posterior and return inference data for ArviZ.

    The dimensions of a weight ``net.0.weight`` are named ``net.0.weight_out``, ``net.0.weight_in`` and
    ``net.0.weight_kernel``; observations have ``obs_id``, ``obs_dim_0`` and so on.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site such as the result of ``reference.nuts``, whose chains and
            sampler statistics are kept.
        x: Inputs, each a tensor or a mapping of tensors with the N examples first; a tuple for several.
        y: Observations, ``(N, *event)``.
        num_samples: Number of draws; as for :func:`predict` when None.
        sites: Names or patterns, such as ``["net.0.*"]``, of the sites in the group ``posterior``; None
            for all, ``()`` for none. All draws of a site are kept in memory. With an empty group
            ``arviz.loo`` needs its ``reff``.
        functions: Further variables of that group by name: functions of one draw, a dict of all sites'
            values ``(*shape)``, that return a tensor of any shape.
        outputs: Whether the group has the model's return value at x, such as means or logits
            ``(N, ...)``, as ``outputs``; several tensors as ``outputs.0``, ``outputs.1`` and so on.
        site: The name of the observed site, if ambiguous.
        max_memory: As for :func:`predict`.
        batch_statistics: As for :func:`predict`.

    Returns:
        An ``arviz.InferenceData`` of ArviZ 0.23, an ``xarray.DataTree`` of ArviZ 1.x, with the groups
        ``posterior``, ``posterior_predictive``, ``log_likelihood`` (one value for each example, or one
        of all together if the model has their joint density, such as under correlated noise),
        ``observed_data`` and, for samplers, ``sample_stats``. Real values are float64, counts and labels
        whole numbers. Observations and outputs of shape (N, 1) lose the last dimension. A guide's draws
        form one chain. Predictive draws keep the ``ignore_index`` of padding. Masked observations have a
        log likelihood of zero.

    Raises:
        ImportError: If ArviZ is not installed.
        TypeError: As :func:`predict`, and if a function returns no tensor.
        ValueError: As :func:`predict`, and if one of ``sites`` matches no site or a name is taken.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 8, noise_scale=0.1)
        >>> x, guide = torch.linspace(-1, 1, 8).unsqueeze(-1), MeanFieldGuide(model)
        >>> norm = {"norm": lambda draw: draw["net.weight"].norm()}
        >>> data = to_inference_data(model, guide, x, 2 * x, 20, functions=norm, outputs=True)
        >>> {name: each.shape for name, each in data["posterior"].data_vars.items() if "w" not in name}
        {'net.bias': (1, 20, 1), 'outputs': (1, 20, 8), 'norm': (1, 20)}
        >>> data["log_likelihood"]["obs"].dims
        ('chain', 'draw', 'obs_id')
    """
    arviz = import_arviz()
    check_posterior(model, posterior)
    batches = as_batches(as_arguments(x), y, None)
    chains, total = getattr(posterior, "num_chains", 1), count_draws(posterior, num_samples)
    if total % chains:
        raise ValueError(
            f"`num_samples` must be a multiple of the {chains} chains, but got {total}."
        )
    group, predicted, functions = _Columns(), _Columns(), functions or {}
    read = partial(_read, outputs)
    with ONE_THREAD, evaluation_mode(model):
        passes = Passes(model, posterior, batches, site, read, max_memory, batch_statistics)
        for done in passes.run(total):
            predicted.add({name: done.outputs.pop(name) for name in ("sample", "log_prob")})
            own = _chosen(done.values, done.outputs, passes.observed, sites, functions)
            group.add(own | done.outputs)
            for number in range(len(next(iter(done.values.values()))) if functions else 0):
                draw = {name: value[number] for name, value in done.values.items()}
                group.add(_values_of(functions, draw))
    name, kept, drawn = passes.observed, group.by_chain(chains), predicted.by_chain(chains)
    kept |= {key: _without_units(kept[key], 3) for key in done.outputs}
    observed, sample = _without_units(_as_array(y), 1), _without_units(drawn["sample"], 3)
    if sample.dtype.kind in "iu":
        observed = observed.astype(sample.dtype)
    dims = {name: dims_like(name, observed.shape, [f"{name}_id"], observed.shape)}
    shapes = {key: value.shape[2:] for key, value in kept.items()}
    for key in done.outputs:
        dims[key] = dims_like(key, shapes[key], dims[name], observed.shape)
    stats = {  # of the chosen draws of a sampler
        key: value.reshape(-1)[spaced(value.size, total)].reshape(len(value), -1)
        for key, value in getattr(posterior, "sample_stats", {}).items()
    }
    groups = {
        "posterior": kept,
        "sample_stats": stats,
        "posterior_predictive": {name: sample},
        "log_likelihood": {name: drawn["log_prob"]},  # ArviZ drops dimensions that it lacks
        "observed_data": {name: observed},
    }
    groups = {key: values for key, values in groups.items() if values}
    coords = {f"{name}_id": np.arange(len(y))}
    options = {"dims": dims_of_sites(model, shapes) | dims, "coords": coords}
    if "posterior" in signature(arviz.from_dict).parameters:  # ArviZ 0.23
        return arviz.from_dict(**groups, **options)
    return arviz.from_dict(groups, **options)


def _read(keeps_outputs: bool, node: Any, returned: Any, y: Tensor | None) -> Values:
    """Return the log density of observations, sampled observations, and the model's return value."""
    assert y is not None
    likelihood = node["fn"]
    log_prob, sample = observed_log_prob(node, y), likelihood.sample()  # the first checks shapes
    if likelihood.support.is_discrete:
        sample = sample.long()
    if (ignored := getattr(base_of(likelihood), "ignore_index", None)) is not None:
        sample = torch.where(y == ignored, y, sample)
    found = {"log_prob": log_prob, "sample": sample}
    if not keeps_outputs:
        return found
    leaves, _ = take_apart(returned)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            "`outputs=True` needs a model that returns a tensor, or tensors in a tuple or dict, but it "
            f"returns {kinds}."
        )
    names = [f"outputs.{number}" for number in range(len(leaves))] if leaves[1:] else ["outputs"]
    return found | dict(zip(names, leaves, strict=True))
