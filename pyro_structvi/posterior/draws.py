"""What predictions begin with: inputs, and joint draws of a posterior, given as a guide or by site."""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import pyro.poutine as poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_structvi._checks import Program, check_tensors
from pyro_structvi._nested import map_nested, nested_tensors
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sites.joint_posterior import JointPosterior, stack_draws
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.ensemble import ensemble_of
from pyro_structvi.weights.lazy import as_drawn
from pyro_structvi.weights.site_role import SiteRole

Posterior = Program | Mapping[str, Tensor]

DEFAULT_NUM_SAMPLES = 100


def check_posterior(model: Callable[..., Any], posterior: Any) -> None:
    """Raise a ``TypeError`` unless a posterior is a guide or draws by site.

    Args:
        model: The model.
        posterior: What is given for its posterior.
    """
    if isinstance(posterior, type):
        got = f"the class {posterior.__name__}. Make a guide of the model, `{posterior.__name__}(model)`"
    elif isinstance(posterior, Mapping):
        return
    elif not callable(posterior):
        got = f"a {type(posterior).__name__}. Pass the guide that was fitted"
    elif poutine.unwrap(posterior) is poutine.unwrap(model):
        got = "the model. Pass the guide that was fitted to it"
    else:
        if isinstance(posterior, StructuredGuide):
            posterior.warn_of_other_model()
        return
    raise TypeError(f"`posterior` must be a guide or a dict of draws by site, but got {got}.")


def as_arguments(x: Any, name: str = "x") -> tuple[Any, ...]:
    """Return a model's arguments as a tuple: one input, or a tuple of them."""
    check_tensors(name, x)
    return x if isinstance(x, tuple) else (x,)


def as_batches(
    args: tuple[Any, ...], y: Tensor | None, batch_size: int | None
) -> list[tuple[tuple[Any, ...], Tensor | None]]:
    """Cut a model's arguments and observations into mini-batches along the first dimension.

    Args:
        args: The model's arguments; a mapping becomes a dict.
        y: Observations, or None.
        batch_size: How many examples a mini-batch has; None for all.

    Returns:
        Arguments and observations of each mini-batch.

    Raises:
        ValueError: If lengths differ.
    """
    if y is not None:
        check_tensors("y", y)
    # What a mapping holds may have another length, as the edges of a graph, if it is not cut.
    cut = args if batch_size is not None else [each for each in args if isinstance(each, Tensor)]
    lengths = [len(value) for value in nested_tensors((cut, y))]
    size = max(lengths, default=1)
    if set(lengths) - {size} or size == 0:
        raise ValueError(f"`x` and `y` must have one length, but got {lengths}.")
    if batch_size is None:
        return [map_nested(lambda tensor: tensor, (args, y))]
    parts = [slice(start, start + batch_size) for start in range(0, size, batch_size)]
    return [map_nested(itemgetter(part), (args, y)) for part in parts]


def batches_of(
    x: Any, y: Tensor | None, batch_size: int | None, posterior: Posterior
) -> list[tuple[tuple[Any, ...], Tensor | None]]:
    """Return the mini-batches of inputs, or of a loader of inputs or tuples ``(*inputs, y)``."""
    is_given = isinstance(x, (Tensor, tuple, list, str, Mapping)) or hasattr(x, "__array__")
    if is_given or not isinstance(x, Iterable):
        return as_batches(as_arguments(x), y, batch_size)
    if y is not None or batch_size is not None:
        raise ValueError(
            "`y` and `batch_size` must be left out where `x` is a loader. Its mini-batches have a size, "
            "and may be tuples `(x, y)`."
        )
    device = next((p.device for p in getattr(posterior, "parameters", tuple)()), None)
    found: list[tuple[tuple[Any, ...], Tensor | None]] = []
    with separate_randomness():  # a loader draws a seed
        batches = [map_nested(lambda value: value.to(device), batch) for batch in x]
    for batch in batches:
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        found += as_batches(parts[:-1] or parts, parts[-1] if parts[1:] else None, None)
    if not found:
        raise ValueError("`x` must give at least one mini-batch, but is a loader that gives none.")
    return found


def count_draws(posterior: Posterior, num_samples: int | None) -> int:
    """Return how many draws to make.

    Args:
        posterior: A guide, or draws by site with the draw as first dimension.
        num_samples: The number asked for, or None for all draws there are, each member of an
            ensemble once, 100 of another guide.

    Returns:
        The number of draws.

    Raises:
        ValueError: If it is not a whole number of at least 1, or more than there are.
    """
    if not isinstance(posterior, Mapping):
        ensemble = ensemble_of(posterior)
        return num_samples or (ensemble.size if ensemble else DEFAULT_NUM_SAMPLES)
    sizes = {name: len(draws) for name, draws in posterior.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"All sites must have the same number of draws, but got {sizes}.")
    available = next(iter(sizes.values()))
    if num_samples is not None and num_samples > available:
        raise ValueError(
            f"`num_samples` must be at most the {available} draws given, but got {num_samples}."
        )
    return num_samples or available


def spaced(available: int, total: int) -> list[int]:
    """Return the numbers of so many draws of those there are, evenly spaced from the first to the last.

    Of chains that lie one after another each gives as many, if their number divides the total.
    """
    step = (available - 1) / max(total - 1, 1)
    return [round(step * number) for number in range(total)]


class Draws:
    """Joint draws of all sites, taken some at a time and stacked, as ordinary tensors.

    Those of a :class:`StructuredGuide` are of its parameters as they are when the first is taken.

    Args:
        posterior: A :class:`StructuredGuide`, any other guide, or draws by site.
        total: How many there will be; of given draws, evenly spaced ones.
        args: Arguments for a guide that needs them.
    """

    def __init__(self, posterior: Posterior, total: int, args: tuple[Any, ...]) -> None:
        self.posterior, self.total, self.args = posterior, total, args
        self.taken = 0
        self._joint: JointPosterior | None = None

    @property
    def left(self) -> int:
        """How many were not taken yet."""
        return self.total - self.taken

    def take(self, count: int) -> dict[str, Tensor]:
        """Return the next draws, ``(count, *shape)`` by site."""
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        if isinstance(self.posterior, Mapping):
            chosen = spaced(count_draws(self.posterior, None), self.total)[numbers[0] : self.taken]
            return {name: draws[chosen] for name, draws in self.posterior.items()}
        if isinstance(self.posterior, StructuredGuide):
            self._joint = self._joint or self.posterior.joint_posterior()
            return self._joint.draw_many(numbers, local=True)
        return stack_draws([_draw_from_guide(self.posterior, self.args) for _ in numbers])


def _draw_from_guide(guide: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Run a guide and keep the values of its sites, auxiliary ones left out."""
    with poutine.block():
        trace = poutine.trace(poutine.mask(guide, mask=False)).get_trace(*args)
    sites = {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site)
    }
    observed = [name for name, site in sites.items() if SiteRole.of(site).is_observation]
    if observed:
        raise TypeError(
            f"`posterior` must be a guide, which samples latent sites only, but got a program with the "
            f"observations {observed}. Pass the guide, not the model."
        )
    return {
        name: as_drawn(site["value"])
        for name, site in sites.items()
        if not SiteRole.of(site).is_auxiliary
    }
