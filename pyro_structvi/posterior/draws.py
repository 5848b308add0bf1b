"""Joint draws of a posterior, given as a guide or as draws by site, and runs of the model at them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_structvi._checks import Program, check_no_nan, check_same_kind, check_shape, check_tensors
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.lazy.weight import as_drawn

Posterior = Program | Mapping[str, Tensor]

DEFAULT_NUM_SAMPLES = 100


def as_arguments(x: Any) -> tuple[Any, ...]:
    """Return a model's arguments as a tuple: one input, or a tuple of them."""
    check_tensors("x", x)
    return x if isinstance(x, tuple) else (x,)


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
        ensemble = posterior.ensemble if isinstance(posterior, StructuredGuide) else None
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


def iterate_draws(
    posterior: Posterior, num_samples: int, args: tuple[Any, ...], local: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Yield joint draws of the sites, each an ordinary tensor by site.

    Args:
        posterior: A :class:`StructuredGuide`, any other guide, or draws by site.
        num_samples: How many; of given draws, evenly spaced ones.
        args: Arguments for a guide that needs them.
        local: Whether to draw a structured guide's local sites too.

    Yields:
        One draw at a time.
    """
    if isinstance(posterior, Mapping):
        available = count_draws(posterior, None)
        step = (available - 1) / max(num_samples - 1, 1)
        for index in (round(step * number) for number in range(num_samples)):
            yield {name: draws[index] for name, draws in posterior.items()}
        return
    for number in range(num_samples):
        if isinstance(posterior, StructuredGuide):
            yield posterior.draw(local, number)
        else:
            yield _draw_from_guide(posterior, args)


def _draw_from_guide(guide: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Run a guide and keep its global sites; sites in plates belong to the data it was run on."""
    with poutine.block():
        trace = poutine.trace(poutine.mask(guide, mask=False)).get_trace(*args)
    return {
        name: as_drawn(site["value"])
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and not site_is_subsample(site)
        and not SiteRole.of(site).is_auxiliary
        and not any(frame.vectorized for frame in site["cond_indep_stack"])
    }


def run_conditioned(
    model: Callable[..., Any], values: dict[str, Tensor], args: tuple[Any, ...]
) -> Any:
    """Run the model at given values of its global sites and return the trace.

    Sites without a value are drawn from the model: local latents, and the observations.
    """
    try:
        with poutine.block(), poutine.mask(mask=False):
            return poutine.trace(poutine.condition(model, data=values)).get_trace(*args)
    except RuntimeError as error:
        _explain_mismatch(values, args, error)
        raise


def _explain_mismatch(
    values: dict[str, Tensor], args: tuple[Any, ...], error: RuntimeError
) -> None:
    """Raise a clear error if an input is of another device or dtype than the draws."""
    name, draw = next(iter(values.items()), ("", None))
    for index, value in enumerate(args if draw is not None else ()):
        if isinstance(value, Tensor) and value.is_floating_point():
            try:
                assert draw is not None
                check_same_kind(f"x[{index}]" if len(args) > 1 else "x", value, name, draw)
            except ValueError as mismatch:
                raise mismatch from error


def find_observation(
    trace: Any, values: dict[str, Tensor], posterior: Posterior, site: str | None
) -> str:
    """Return the name of the observed site of a model that was run without observations.

    Args:
        trace: The trace of that run.
        values: The latent sites' values in that run.
        posterior: What the latent sites were drawn from.
        site: The name if the caller gave it.

    Returns:
        The name.

    Raises:
        ValueError: If there is no such site, or several could be meant.
    """
    latent = set(values)
    if isinstance(posterior, StructuredGuide):
        latent |= set(posterior.site_names)
    free = [
        name
        for name, node in trace.nodes.items()
        if node["type"] == "sample"
        and not site_is_subsample(node)
        and not node["infer"].get("_deterministic")
        and name not in latent
    ]
    marked = [name for name in free if SiteRole.of(trace.nodes[name]).is_observation]
    candidates = [name for name in free if name == site] if site else marked or free
    if len(candidates) != 1:
        raise ValueError(
            f"The observed site must be one of {free}"
            + (f", but got `site='{site}'`." if site else ": pass its name as `site=`.")
        )
    return str(candidates[0])


def observed_log_prob(likelihood: Any, y: Tensor) -> Tensor:
    """Return the log density of observations, after a check that they have its shape."""
    check_no_nan("y", y)
    check_shape("y", y, likelihood.batch_shape + likelihood.event_shape, "that of the predictions")
    if not likelihood.support.is_discrete:
        check_same_kind("y", y, "prediction.mean", likelihood.mean)
    log_density: Tensor = likelihood.log_prob(y)
    return log_density


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout off and freeze running statistics, without gradients; put back after."""
    module = poutine.unwrap(model)
    modules = list(module.modules()) if isinstance(module, nn.Module) else []
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
