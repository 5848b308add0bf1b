"""ArviZ as it is installed: what differs between 0.23 and 1.x."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from math import prod
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from numpy.typing import NDArray
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._checks import Count, Positive, Program, check, checked, shape_text
from pyro_structvi._pyro import ONE_THREAD, declared_name, declared_samples
from pyro_structvi._torch import take_apart
from pyro_structvi.linalg.precision import at_least_single
from pyro_structvi.nn.conversion import layout_of, parametrized
from pyro_structvi.nn.priors import matches
from pyro_structvi.posterior.passes import (
    Passes,
    Posterior,
    as_arguments,
    as_batches,
    check_posterior,
    count_draws,
    spaced,
)
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob
from pyro_structvi.weights.torch_distributions import base_of


def import_arviz() -> Any:
    """Return ArviZ, imported without its announcement of the next version.

    ArviZ 0.23 makes it at the first import of each day. Other warnings of the import are shown.

    Raises:
        ImportError: If ArviZ, or what it needs, is not installed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        try:
            import arviz
        except ModuleNotFoundError as error:
            raise ImportError(
                'ArviZ is needed: `pip install "pyro-structvi[diagnostics]"`.'
            ) from error
    return arviz


def from_groups(
    arviz: Any,
    groups: Mapping[str, Mapping[str, Any]],
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Any],
) -> Any:
    """Return what ArviZ keeps inference data in, made of arrays.

    ArviZ 0.23 takes each group as a keyword and makes an ``InferenceData``; 1.x takes a mapping of
    groups and makes an ``xarray.DataTree``. Both give a variable of the group ``log_likelihood`` the
    first of its dimensions where it has fewer.

    Args:
        arviz: The module.
        groups: Arrays by group and name; of draws ``(chain, draw, *shape)``. Empty groups are left out.
        dims: Names of the dimensions of each variable, without those of the draws.
        coords: Coordinates by dimension; whole numbers where there are none.
    """
    given = {name: dict(group) for name, group in groups.items() if group}
    names = {"dims": {name: [*own] for name, own in dims.items()}, "coords": dict(coords)}
    if "posterior" in signature(arviz.from_dict).parameters:
        return arviz.from_dict(**given, **names)
    return arviz.from_dict(given, **names)


def pareto_smoothed(log_weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return log weights smoothed by a generalized Pareto distribution, and the shape of their tail.

    ArviZ 1.x has the function in its part ``arviz_stats``, and takes minus the log weights.

    Args:
        log_weights: Logs of importance weights, ``(draws,)``.

    Raises:
        ImportError: If ArviZ is not installed.
    """
    arviz = import_arviz()
    if hasattr(arviz, "psislw"):
        smoothed, k_hat = arviz.psislw(log_weights)
    else:
        array_stats = import_module("arviz_stats.base").array_stats
        smoothed, k_hat = array_stats.psislw(-log_weights)
    return np.asarray(smoothed), float(k_hat)


class Columns:
    """Values by name, which come some draws at a time."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values of several draws, ``(draws, *shape)`` by name."""
        for name, value in values.items():
            self.parts.setdefault(name, []).append(as_array(value))

    def joined(self) -> dict[str, Any]:
        """Return arrays of all draws by name."""
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


class PosteriorGroup(Columns):
    """Chosen sites, functions of all sites, and what the model returns.

    Args:
        sites: Names or patterns of the sites; None for all.
        functions: Functions of a draw, by name.

    Attributes:
        outputs: The names of what the model returns.
    """

    def __init__(self, sites: Sequence[str] | None, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self.sites, self.functions = sites, functions
        self.outputs: list[str] = []

    def add_draws(
        self, values: Mapping[str, Tensor], outputs: Mapping[str, Tensor], observed: str
    ) -> None:
        """Add what is asked for of several draws.

        Args:
            values: All sites' values, ``(draws, *shape)``.
            outputs: What the model returned, ``(draws, N, ...)`` by name.
            observed: The observed site.

        Raises:
            TypeError: If a function returns no tensor.
            ValueError: If a pattern matches no site, a name is taken, or the shape of a function's
                values changes.
        """
        self._check_names([*values], [*outputs], observed)
        self.outputs = [*outputs]
        self.add({name: value for name, value in values.items() if self._is_chosen(name)})
        self.add(outputs)
        count = len(next(iter(values.values())))
        for number in range(count if self.functions else 0):
            draw = {name: value[number] for name, value in values.items()}
            for name in self.functions:
                self._add_function(name, draw)

    def _is_chosen(self, name: str) -> bool:
        return self.sites is None or any(matches(name, pattern) for pattern in self.sites)

    def _check_names(self, sites: list[str], outputs: list[str], observed: str) -> None:
        for pattern in self.sites or ():
            if not any(matches(name, pattern) for name in sites):
                raise ValueError(
                    f"`sites` must be names or patterns of the sites {sites}, but '{pattern}' matches "
                    "none of them."
                )
        for name in outputs:
            if name in [*sites, observed]:
                raise ValueError(
                    f"The model has a site '{name}', so `outputs` must be False. Take `predict`'s "
                    "`functions` in its place."
                )
        for name in self.functions:
            if name in [*sites, *outputs, observed]:
                raise ValueError(
                    f"`functions` must have names of their own, but '{name}' is a site of the model, or "
                    "its outputs."
                )

    def _add_function(self, name: str, draw: dict[str, Tensor]) -> None:
        try:
            value = self.functions[name](draw)
        except Exception as error:
            error.add_note(f"`functions[{name!r}]` was called with a draw of the sites {[*draw]}.")
            raise
        check(f"functions[{name!r}](draw)", value, Tensor)
        before = self.parts.get(name)
        if before and value.shape != before[0].shape[1:]:
            raise ValueError(
                f"`functions[{name!r}]` must return the same shape for each draw, but got "
                f"{shape_text(before[0].shape[1:])} and {shape_text(value.shape)}."
            )
        self.add({name: value.unsqueeze(0)})


def as_array(values: Tensor) -> Any:
    """Return an array on the host with memory of its own, in float64 if values are real."""
    array = at_least_single(values.detach()).cpu().numpy()
    return array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else array.dtype)


def one_by_one(values: Any, lead: int) -> Any:
    """Return an array without the dimensions behind the first ``lead`` where they have one element."""
    return values.reshape(values.shape[:lead] if prod(values.shape[lead:]) == 1 else values.shape)


def dims_of_sites(
    model: Callable[..., Any], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    """Return names for the dimensions of a model's sites.

    Those of a weight that a module declares end in ``_out``, ``_in`` and ``_kernel``, and that of a bias
    or of a normalization in ``_out``; dimensions of one kind are numbered. Where nothing is known of a
    site they are numbered as ArviZ does it, ``_dim_0`` and so on.

    Args:
        model: The model.
        shapes: The shapes of values, by site.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> net = bayesianize(nn.Conv2d(3, 8, 5), prior=1.0)
        >>> dims_of_sites(net, {"weight": (8, 3, 5, 5)})["weight"]
        ['weight_out', 'weight_in', 'weight_kernel_0', 'weight_kernel_1']
    """
    found = {name: numbered_dims(name, len(shape)) for name, shape in shapes.items()}
    for name, module, attribute in _declared(model):
        kinds = _kinds(module, attribute, torch.Size(shapes.get(name, ())))
        if kinds:
            found[name] = [f"{name}_{kind}" for kind in _told_apart(kinds)]
    return found


def dims_of_observations(site: str, shape: Sequence[int]) -> list[str]:
    """Return names for the dimensions of observations ``(N, *event)`` at a site."""
    return [f"{site}_id", *numbered_dims(site, len(shape) - 1)]


def dims_beside(
    name: str, shape: Sequence[int], known: Sequence[str], known_shape: Sequence[int]
) -> list[str]:
    """Return names for the dimensions of a variable, the known ones for as long as their sizes agree."""
    pairs = zip(shape, known_shape, strict=False)
    shared = next((at for at, (own, other) in enumerate(pairs) if own != other), len(known))
    shared = min(shared, len(shape))
    return [*known[:shared], *numbered_dims(name, len(shape) - shared)]


def numbered_dims(name: str, count: int) -> list[str]:
    """Return names for dimensions of which nothing is known, as ArviZ gives them."""
    return [f"{name}_dim_{number}" for number in range(count)]


def _declared(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each site that a module declares, with the module that has the weight, and its attribute."""
    net = poutine.unwrap(model)
    computed = parametrized(net) if isinstance(net, nn.Module) else {}
    for module in net.modules() if isinstance(net, nn.Module) else ():
        for attribute in declared_samples(module) if isinstance(module, PyroModule) else ():
            owner = computed.get(id(module), module)
            yield (
                declared_name(module, attribute),
                owner,
                attribute if owner is module else "weight",
            )


def _kinds(module: nn.Module, attribute: str, shape: torch.Size) -> list[str]:
    """Return what each dimension of a weight or bias counts; nothing where that is not known."""
    if len(shape) == 1 and ("weight" in attribute or "bias" in attribute):
        return ["out"]
    layout = layout_of(module, attribute, shape)
    if layout.input_dim is None or "weight" not in attribute:
        return []
    further = "in" if isinstance(module, nn.Bilinear) else "kernel"
    first = ["in", "out"] if layout.input_dim == 0 else ["out", "in"]
    return [*first, *(further for _ in shape[2:])]


def _told_apart(kinds: list[str]) -> list[str]:
    """Return the kinds, with numbers where there are several of one."""
    return [
        f"{kind}_{kinds[:at].count(kind)}" if kinds.count(kind) > 1 else kind
        for at, kind in enumerate(kinds)
    ]


Values = dict[str, Tensor]


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
    """Draw from a posterior and put what ArviZ needs into its own form.

    The dimensions of a weight ``net.0.weight`` are named ``net.0.weight_out``, ``net.0.weight_in`` and
    ``net.0.weight_kernel``, those of observations ``obs_id``, ``obs_dim_0`` and so on, in all groups.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site such as those of ``reference.nuts``, whose chains are
            kept apart and whose statistics of the sampler are kept.
        x: Inputs, first dimension the N examples; a tuple for a model of several inputs. An input is a
            tensor, or a mapping of tensors, such as a ``BatchEncoding``.
        y: Observations, ``(N, *event)``.
        num_samples: Number of draws; None for all that are given, or 100 of a guide.
        sites: Which sites to keep in the group ``posterior``, by name or pattern, such as
            ``["net.0.*"]``; None for all, ``()`` for none. The weights of a large net take the memory of
            all draws together. With nothing in the group ``arviz.loo`` needs its ``reff``.
        functions: What else to keep there, by name: functions of one draw, a dict of all sites' values
            ``(*shape)``, that return a tensor of any shape.
        outputs: Whether to keep there, as ``outputs``, what the model returns at x, such as means or
            logits ``(N, ...)``; as ``outputs.0``, ``outputs.1``, ... where it returns several tensors.
        site: The observed site's name, where it cannot be told from the model.
        max_memory: As for :func:`predict`.
        batch_statistics: As for :func:`predict`.

    Returns:
        An ``arviz.InferenceData`` of ArviZ 0.23, an ``xarray.DataTree`` of ArviZ 1.x, with the groups
        ``posterior``, ``posterior_predictive``, ``log_likelihood`` (one value for each example),
        ``observed_data`` and, of NUTS, ``sample_stats``; real values in float64, counts and labels as
        whole numbers. Observations and outputs of shape (N, 1) lose the last dimension, as log
        likelihoods have none. A guide's draws form one chain. Where a token is not observed, as in
        padding, predictive draws have its ``ignore_index`` too, and where the model masks an observation
        its log likelihood is zero.

    Raises:
        ImportError: If ArviZ is not installed.
        TypeError: If ``posterior`` is neither a guide nor draws, or a function returns no tensor.
        ValueError: If numbers or lengths do not fit, the observed site is ambiguous, ``posterior``
            does not have exactly the model's global sites, one of ``sites`` matches none of them, or
            a name is taken; if ``batch_statistics`` are given for a model without batch normalization.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(1, 1), prior=1.0)
        >>> model = Regressor(net, num_data=8, noise_scale=0.1)
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(-1)
        >>> data = to_inference_data(
        ...     model,
        ...     MeanFieldGuide(model),
        ...     x,
        ...     2 * x,
        ...     num_samples=20,
        ...     sites=["*.bias"],
        ...     functions={"norm": lambda draw: draw["net.weight"].norm()},
        ...     outputs=True,
        ... )
        >>> {name: each.shape for name, each in data["posterior"].data_vars.items()}
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
    group, predicted = PosteriorGroup(sites, functions or {}), Columns()
    read = partial(_read, outputs)
    with ONE_THREAD, evaluation_mode(model):
        passes = Passes(model, posterior, batches, site, read, max_memory, batch_statistics)
        for done in passes.run(total):
            predicted.add({name: done.outputs.pop(name) for name in ("sample", "log_prob")})
            group.add_draws(done.values, done.outputs, passes.observed)

    def by_chain(columns: Columns) -> dict[str, Any]:
        return {
            name: values.reshape(chains, total // chains, *values.shape[1:])
            for name, values in columns.joined().items()
        }

    name, kept, drawn = passes.observed, by_chain(group), by_chain(predicted)
    kept |= {key: one_by_one(kept[key], 3) for key in group.outputs}
    observed, sample = one_by_one(as_array(y), 1), one_by_one(drawn["sample"], 3)
    if sample.dtype.kind in "iu":
        observed = observed.astype(sample.dtype)
    dims = dims_of_observations(name, observed.shape)
    groups = {
        "posterior": kept,
        "sample_stats": _sample_stats(posterior, total),
        "posterior_predictive": {name: sample},
        "log_likelihood": {name: drawn["log_prob"]},
        "observed_data": {name: observed},
    }
    shapes = {key: value.shape[2:] for key, value in kept.items()}
    all_dims = dims_of_sites(model, shapes) | {name: dims}
    for key in group.outputs:
        all_dims[key] = dims_beside(key, shapes[key], dims, observed.shape)
    return from_groups(arviz, groups, all_dims, {dims[0]: np.arange(len(y))})


def _sample_stats(posterior: Any, total: int) -> dict[str, Any]:
    """Return a sampler's statistics ``(chain, draw)`` at the draws that are taken; none of a guide."""
    return {
        name: value.reshape(-1)[spaced(value.size, total)].reshape(len(value), -1)
        for name, value in getattr(posterior, "sample_stats", {}).items()
    }


def _read(keeps_outputs: bool, node: Any, returned: Any, y: Tensor | None) -> Values:
    """Score observations, draw others, and take what the model returns."""
    assert y is not None
    log_prob = observed_log_prob(node, y)  # it looks at their shape
    found = {"log_prob": log_prob, "sample": _draw_like(node["fn"], y)}
    return found | (_outputs(returned) if keeps_outputs else {})


def _draw_like(likelihood: Any, y: Tensor) -> Tensor:
    """Draw observations, counts as whole numbers, without those that are not in ``y``."""
    drawn = likelihood.sample()
    if likelihood.support.is_discrete:
        drawn = drawn.long()
    ignored = getattr(base_of(likelihood), "ignore_index", None)
    return drawn if ignored is None else torch.where(y == ignored, y, drawn)


def _outputs(returned: Any) -> Values:
    leaves, _ = take_apart(returned)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            "`outputs=True` needs a model that returns a tensor, or tensors in a tuple or dict, but it "
            f"returns {kinds}."
        )
    names = [f"outputs.{number}" for number in range(len(leaves))] if leaves[1:] else ["outputs"]
    return dict(zip(names, leaves, strict=True))
