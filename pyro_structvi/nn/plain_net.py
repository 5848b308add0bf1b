"""Conversion of a Bayesian net to a plain net with given weights."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pyro_structvi._checks import shape_text
from pyro_structvi._pyro import declared_name, declared_samples, make_plain_module
from pyro_structvi._torch import remove_hooks
from pyro_structvi.nn.priors import BufferedPrior, ScaledPrior, TiedPrior
from pyro_structvi.nn.random_module import PASS_HOOKS, frozen_names, keep_priors_only

_ADDED = ("initial_values", "parameter_names", "frozen_parameters")


def plain_net(net: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a Bayesian net whose sites are parameters with given values.

    The copy shares no memory with the net or its original.
    """
    memo: dict[int, Any] = {}  # values that need no copy
    for module in net.modules():
        starts = vars(module).get("initial_values", {}).values()
        buffers = map(module.get_buffer, _prior_buffers(module))
        memo |= {id(value): value for value in (*starts, *buffers)}
    copied: nn.Module = copy.deepcopy(net, memo)
    made: dict[Any, nn.Parameter] = {}
    parameters = [(module, _parameters_of(module, made, values)) for module in copied.modules()]
    for module, own in parameters:
        _make_plain(module, own)
    return copied


def _prior_buffers(module: nn.Module) -> list[str]:
    priors = declared_samples(module).values()
    buffered = [prior for prior in priors if isinstance(prior, BufferedPrior)]
    return [name for prior in buffered for name in prior.buffers.values()]


def _parameters_of(
    module: Any, made: dict[Any, nn.Parameter], values: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Return the parameters of a plain module in the order of the net; tied sites share a parameter."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    samples = declared_samples(module)
    scales = {prior.scale for prior in samples.values() if isinstance(prior, ScaledPrior)}
    for attribute in (name for name in samples if name not in scales):
        prior, site = samples[attribute], (module, attribute)
        if isinstance(prior, TiedPrior):
            site = prior.owner, prior.attribute
        name = declared_name(*site)
        if name not in made:
            made[name] = nn.Parameter(_value_of(*site, name, values))
        own[attribute] = made[name]
    for name in frozen_names(module):
        value = module.get_buffer(name)
        frozen = nn.Parameter(value, requires_grad=False)
        own[name] = made.setdefault((value.data_ptr(), value.shape), frozen)
    order = vars(module).get("parameter_names", ())
    return {name: own[name] for name in dict.fromkeys([*order, *own])}


def _value_of(module: Any, attribute: str, name: str, values: Mapping[str, Tensor]) -> Tensor:
    value, start = values.get(name), vars(module).get("initial_values", {}).get(attribute)
    if value is None or (start is not None and value.shape != start.shape):
        expected = "" if start is None else f" of shape {shape_text(start.shape)}"
        got = "none" if value is None else shape_text(value.shape)
        raise ValueError(
            f"`draw` must have a value{expected} for the site '{name}', but got {got}. Pass one draw, "
            "as `guide.draw()` returns it."
        )
    return value.detach().clone()


def _make_plain(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Restore the original class of a module, with parameters in place of sites and buffers."""
    removed = [*_prior_buffers(module), *frozen_names(module)]
    samples, is_plain = [*declared_samples(module)], "parameter_names" in vars(module)
    remove_hooks(module, (*PASS_HOOKS, keep_priors_only))
    for name in _ADDED:
        vars(module).pop(name, None)
    make_plain_module(module)
    present = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    # A factor layer stays a PyroModule, which deletes a removed parameter from the param store.
    for name in (*removed, *(present if is_plain else samples)):
        delattr(module, name)
    for name, parameter in parameters.items():
        if is_plain or name not in present:
            setattr(module, name, parameter)
