"""Latents of single examples, which a posterior knows only for the examples that it was fitted to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Size

from pyro_structvi._checks import warn_user
from pyro_structvi.guides.sites import find_sites_by_running
from pyro_structvi.guides.starts import separate_randomness


class LocalLatentWarning(UserWarning):
    """Latents of single examples take the posterior's values, or are drawn from the model."""


def warn_of_local_latents(kept: Sequence[str], new: Sequence[str]) -> None:
    """Say where the latents of single examples come from, if there are some.

    Args:
        kept: The sites that take the values of the posterior.
        new: The sites that are drawn from the model.
    """
    if kept:
        warn_user(
            f"The latents {[*kept]} of single examples take the values of the posterior, since it was "
            "fitted to as many examples as there are here. If these are other examples, predict by "
            "`predict` with draws of the other sites only, so that the model draws these.",
            LocalLatentWarning,
        )
    if new:
        warn_user(
            f"The latents {[*new]} of single examples are drawn from the model, since these are not the "
            "examples that the posterior was fitted to, or not all of them at once.",
            LocalLatentWarning,
        )


def of_other_examples(
    model: Callable[..., Any],
    shapes: Mapping[str, Size],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[str]:
    """Return the local sites that a model has for other examples than those fitted to, and say so.

    Args:
        model: The model.
        shapes: The shapes of the sites' posteriors.
        args: The model's arguments.
        kwargs: Its keyword arguments.
    """
    with separate_randomness():
        found = find_sites_by_running(model, args, kwargs)
    new = [name for name in shapes if name not in found or found[name].site.shape != shapes[name]]
    warn_of_local_latents([name for name in shapes if name not in new], new)
    return new
