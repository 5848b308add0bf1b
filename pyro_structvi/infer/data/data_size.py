"""How many examples a model counts, and how many the data have."""

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_structvi._checks import warn_user
from pyro_structvi.guides.sites import trial_run
from pyro_structvi.guides.starts import separate_randomness
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.nn.likelihoods import Likelihood


class NumDataWarning(UserWarning):
    """The model counts another number of examples than the data have."""


def set_num_data(model: Any, found: int | None) -> None:
    """Tell a model how many examples there are, or compare with what it was told.

    Args:
        model: The model; only a :class:`~pyro_structvi.nn.likelihoods.Likelihood` takes the number.
        found: How many examples the data have; None where that is not known.

    Raises:
        ValueError: If neither model nor data say how many.
    """
    if not isinstance(model, Likelihood):
        return
    if not model.is_num_data_given:
        if found is None:
            raise ValueError(
                "`num_data` must be given to the model, since `data` does not tell how many examples "
                f"it has: `{type(model).__name__}(net, num_data=...)`."
            )
        model.num_data = found
    elif found not in (None, model.num_data):
        warn_user(
            f"The model was told of num_data={model.num_data} examples, and `data` has {found}. The "
            "likelihood counts as that of the former; leave `num_data` out to have it set.",
            NumDataWarning,
        )


def check_scale(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_batches: int,
    size: int | None,
) -> None:
    """Warn if a model of the user's own counts a mini-batch for all the data.

    Args:
        model: The model.
        args: Its arguments in the first step.
        kwargs: Its keyword arguments.
        num_batches: How many mini-batches a pass through the data has.
        size: How many examples the data have, if that is known.
    """
    if num_batches == 1 or isinstance(poutine.unwrap(model), Likelihood):
        return
    scales = _ObservedScales()
    with separate_randomness(), trial_run(model), scales:
        model(*args, **kwargs)
    unscaled = [name for name, is_scaled in scales.found.items() if not is_scaled]
    if unscaled:
        whole = "all examples" if size is None else f"all {size} examples"
        warn_user(
            f"The observed sites {unscaled} count a mini-batch for all the data: their scale is 1, and "
            f"a pass through `data` has {num_batches} mini-batches, so the posterior will be too wide. "
            f"Give their plate the number of {whole}, `pyro.plate(name, size, subsample=x)`.",
            NumDataWarning,
        )


class _ObservedScales(Messenger):
    """Records whether the observed sites of a model have a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, bool] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        if SiteRole.of(msg).is_observation:
            scale = msg["scale"]
            self.found[msg["name"]] = isinstance(scale, Tensor) or scale != 1
