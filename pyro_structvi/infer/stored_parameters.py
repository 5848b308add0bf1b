"""Parameters that a program reads by ``pyro.param``, which no module of model or guide has."""

from contextlib import suppress
from typing import Any

import pyro.poutine as poutine
from torch import nn

from pyro_structvi._pyro import module_parameter, parameter_names
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.steps.eager import Loss
from pyro_structvi.sites.finding import separate_randomness, trial_run
from pyro_structvi.sites.site_posterior import module_key
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.sites.trial_handlers import ValuesWithoutDraws


def add_stored_parameters(loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run model and guide once, and add the parameters to a loss that only Pyro's store has.

    An error comes again in the first step, which words it.
    """
    model, guide = loss.parts
    met, later = poutine.trace(param_only=True), suppress(ValueError, RuntimeError)
    with later, trial_run(model), separate_randomness(), met, ValuesWithoutDraws():
        model(*args, **kwargs)
        if not isinstance(guide, StructuredGuide):  # which owns its parameters
            guide(*args, **kwargs)
    # A module uses its own parameters, also where the store has a former module's under their names.
    own = {name for module in loss.modules() for name in parameter_names(module)}
    known = {id(parameter) for parameter in loss.parameters()}
    found = {
        name: module_parameter(name, site["args"])
        for name, site in met.trace.nodes.items()
        if site["type"] == "param" and name not in own
    }
    new = {
        name: value for name, value in found.items() if value is not None and id(value) not in known
    }
    if new:
        stored = nn.Module()
        loss.add_module("stored", stored)
        for name, value in new.items():
            stored.register_parameter(module_key(name), value)


def refuse_stored_parameters(
    model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise a ``ValueError`` if model or guide have parameters that only Pyro's store has."""
    loss = Loss(model, guide, StructuredELBO())
    before = {*loss.trained}
    add_stored_parameters(loss, args, kwargs)
    stored = [name.removeprefix("stored.") for name in loss.trained if name not in before]
    if stored:
        raise ValueError(
            f"`model` must have its parameters in modules, but reads {stored} by `pyro.param`, which no "
            "optimizer of Lightning has. Make them `PyroParam` attributes of a `PyroModule`, or train "
            "by `fit`."
        )
