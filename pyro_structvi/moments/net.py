"""The moments of a net's output, in one pass."""

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi._checks import brief
from pyro_structvi._pyro import site_values
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.moments import rules as rules  # answers calls with random tensors
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.nn.likelihoods.likelihood import Likelihood


def output_moments(
    model: Likelihood, values: Mapping[str, Tensor], x: Any, settings: Settings
) -> RandomTensor:
    """Return the moments of the output of a model's net.

    Args:
        model: The model.
        values: The values of its sites, random or known, of :func:`~.weights.random_values`.
        x: The net's input.
        settings: How moments are propagated.

    Raises:
        NotImplementedError: If a function of the net has no rule; the message names the module.
    """
    with site_values(model) as cache:
        cache.update(values)
        try:
            output, _ = model.run_net(x)
        except NotImplementedError as error:
            raise NotImplementedError(_explained(error, model, settings)) from None
    if isinstance(output, RandomTensor):
        return output
    return RandomTensor(output, torch.zeros_like(output), settings)  # no weight is random


def _explained(error: Exception, model: nn.Module, settings: Settings) -> str:
    """Return a message with the module that an error came from, and what to do where it does not say."""
    text, place = str(error), _place(error, model)
    if text.endswith("."):
        return f"{text} This was met{place.removeprefix(',')}." if place else text
    tangent = "Pass `linearize=True` to take its tangent at the mean, or predict with draws."
    return f"{text}{place}. {'Predict with draws.' if settings.linearize else tangent}"


def _place(error: Exception, model: nn.Module) -> str:
    """Return where in a model an error came from, by the innermost of its modules that ran."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            kind = type(module).__name__.removeprefix("Pyro")
            found = f", in the module '{names[id(module)]}' ({kind})"
    return found


def check_served(model: Any, guide: Any, name: str) -> None:
    """Raise unless moments can be propagated through a model with a posterior.

    Args:
        model: The model.
        guide: The posterior.
        name: The name of that argument.

    Raises:
        TypeError: If the model is none of the likelihoods around a net, or the posterior no guide.
        NotImplementedError: If the guide has latents of single examples.
    """
    if not isinstance(model, Likelihood):
        raise TypeError(
            "`model` must be a Classifier, Regressor or another likelihood around a net, whose output "
            f"has moments, but got {brief(model)}. Predict with draws."
        )
    if not isinstance(guide, StructuredGuide):
        raise TypeError(
            f"`{name}` must be a guide of this package, which knows the moments of its weights, but got "
            f"{brief(guide)}. Predict with draws."
        )
    if guide.local_site_names:
        raise NotImplementedError(
            f"The latents of single examples, {[*guide.local_site_names]}, have no moments here. "
            "Predict with draws."
        )


def used_more_than_once(model: Likelihood, guide: StructuredGuide) -> list[str]:
    """Return the weights that a pass uses several times, whose uses count as independent.

    Those of recurrent layers are among them, which use theirs at every step.
    """
    recurrent = {name for name, part in model.named_modules() if isinstance(part, nn.RNNBase)}
    return [
        name
        for name, use in guide.uses.items()
        if (use.count or 0) > 1 or name.rpartition(".")[0] in recurrent
    ]
