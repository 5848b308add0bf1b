"""How many examples a model counts, and how many the data have."""

from typing import Any

import pyro.poutine as poutine
from torch import nn

from pyro_structvi._checks import brief, warn_user
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.sites.structured import StructuredGuide


class NumDataWarning(UserWarning):
    """The model counts another number of examples than the data have."""


def set_num_data(model: Any, guide: Any, found: int | None) -> None:
    """Tell a model how many examples there are, or compare with what it was told.

    Args:
        model: The model; only a :class:`~pyro_structvi.nn.likelihood.Likelihood` takes the number.
        guide: The guide, which must be of this model.
        found: How many examples the data have; None where that is not known.

    Raises:
        ValueError: If neither model nor data say how many, or the guide is of another model.
    """
    model = poutine.unwrap(model)
    own = poutine.unwrap(guide.model) if isinstance(guide, StructuredGuide) else None
    are_modules = isinstance(own, nn.Module) and isinstance(model, nn.Module)
    if are_modules and not any(part is own for part in model.modules()):
        raise ValueError(
            f"`guide` must be made of `model`, {brief(model)}, but was made of another module, "
            f"{brief(own)}. Write `fit(guide.model, guide, data)`, or `{type(guide).__name__}(model)`."
        )
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
