"""Whether a model mixes the examples of a batch, as graph nets do: by what a change reaches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_structvi._torch import BatchOrInstanceNorm
from pyro_structvi.guides.sites import trial_run
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.lazy.site_use import SiteUse
from pyro_structvi.lazy.stand_in import WeightStandIn, as_drawn
from pyro_structvi.maps.readings import Application, FactorApplication, Lookup


def mixes_examples(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether what one row meets in a layer reaches the observations of other examples.

    The model runs twice on the same draws, the second time with changed outputs of each layer in the
    first row. Normalizations over a batch do not count: they take their running statistics here.

    Args:
        model: The model.
        args: Its arguments, observations included.
        kwargs: Its keyword arguments.
    """
    plain = _Probe({}, changes=False)
    changed = _Probe(plain.values, changes=True)
    for probe in (plain, changed):
        with trial_run(model), _running_statistics(model), torch.random.fork_rng():
            torch.manual_seed(0)
            with probe:
                model(*args, **kwargs)
    return any(
        bool((plain.log_probs[name] != value).flatten(1).any(1)[1:].any())
        for name, value in changed.log_probs.items()
    )


class _Probe(Messenger):
    """Records the log densities of observations; from the same seed each time, the draws are the same.

    Args:
        values: The values at the sites, such as observations; those that are missing are added.
        changes: Whether the first row of each layer's outputs is changed.
    """

    def __init__(self, values: dict[str, Tensor], changes: bool) -> None:
        super().__init__()
        self.values, self._changes = values, changes
        self.log_probs: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        name = msg["name"]
        value = self.values.setdefault(name, msg["value"])
        if SiteRole.of(msg).is_observation and msg["fn"].batch_shape:
            log_prob = msg["fn"].log_prob(value)
            self.log_probs[name] = log_prob.nan_to_num().unsqueeze(-1)
        elif self._changes and not msg["is_observed"] and not site_is_subsample(msg):
            msg["value"] = _ChangedWeight(value)


class _ChangedWeight(WeightStandIn):
    """A weight whose outputs are changed in the first row.

    Args:
        value: The weight.
    """

    _value: Tensor

    def __new__(cls, value: Tensor) -> Self:
        """Make the tensor that stands for the weight."""
        weight = cls._make(value, value.shape, SiteUse(""))
        weight._value = value
        return weight

    def draw(self) -> Tensor:
        """Return the weight."""
        return self._value

    def _draw_outputs(self, application: Application) -> Tensor:
        linear_map, x, _, bias, _ = application
        matrix = application.matrix_of(self._value)
        return _with_another_row(linear_map(as_drawn(x), matrix, as_drawn(bias)))

    def _draw_rows(self, lookup: Lookup) -> Tensor:
        return _with_another_row(lookup.shape_outputs(self._value[lookup.indices]))

    def _draw_per_example(self, application: FactorApplication) -> Tensor:
        return _with_another_row(application.function(application.x, self._value))


def _with_another_row(outputs: Tensor) -> Tensor:
    changed = outputs.clone()
    changed[0] = 2 * outputs[0].abs() + 1
    return changed


@contextmanager
def _running_statistics(model: Callable[..., Any]) -> Iterator[None]:
    root = poutine.unwrap(model)
    modules = root.modules() if isinstance(root, nn.Module) else ()
    training = [part for part in modules if isinstance(part, BatchOrInstanceNorm) and part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True
