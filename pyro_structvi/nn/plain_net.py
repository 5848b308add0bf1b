"""From a Bayesian net back to a net of the user's own classes, at given weights."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pyro_structvi._checks import shape_text
from pyro_structvi._pyro import declared_name, declared_samples, make_plain_module
from pyro_structvi._torch import list_weights, remove_hooks
from pyro_structvi.nn.every_site import PASS_HOOKS
from pyro_structvi.nn.frozen import frozen_names
from pyro_structvi.nn.prior_sites import BufferedPrior, ScaledPrior
from pyro_structvi.nn.sampled_copy import STATE_HOOKS

_ADDED = ("initial_values", "parameter_names", "frozen_parameters")


def plain_net(net: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a Bayesian net whose sites are parameters with given values.

    It shares no memory with the net, nor with the one that was made Bayesian.

    Args:
        net: The Bayesian net.
        values: Values of its sites, by name.

    Raises:
        ValueError: If a site has no value, or one of another shape.
    """
    memo: dict[int, Any] = {}  # what the copy does not keep
    for module in net.modules():
        starts = vars(module).get("initial_values", {}).values()
        buffers = map(module.get_buffer, _prior_buffers(module))
        memo |= {id(value): value for value in (*starts, *buffers)}
    copied: nn.Module = copy.deepcopy(net, memo)
    made: dict[Any, nn.Parameter] = {
        (id(module), attribute): _parameter_of(module, attribute, values)
        for module in copied.modules()
        for attribute, prior in declared_samples(module).items()
        if not getattr(prior, "is_tied", False) and attribute not in _scales(module)
    }
    parameters = [(module, _own_parameters(module, made)) for module in copied.modules()]
    for module, own in parameters:
        _make_plain(module, own)
    return copied


def _prior_buffers(module: nn.Module) -> list[str]:
    priors = declared_samples(module).values()
    buffered = [prior for prior in priors if isinstance(prior, BufferedPrior)]
    return [name for prior in buffered for name in prior.buffers.values()]


def _scales(module: nn.Module) -> set[str]:
    """Return the sites that are scales of priors, and no parameters of the net."""
    priors = declared_samples(module).values()
    return {prior.scale for prior in priors if isinstance(prior, ScaledPrior)}


def _parameter_of(module: Any, attribute: str, values: Mapping[str, Tensor]) -> nn.Parameter:
    name = declared_name(module, attribute)
    if name not in values:
        raise ValueError(
            f"`draw` must have a value for the site '{name}', but has {[*values]}. Pass what "
            "`guide.draw()` returns."
        )
    value, initial = values[name].detach(), vars(module).get("initial_values", {}).get(attribute)
    if initial is not None and value.shape != initial.shape:
        raise ValueError(
            f"`draw` must have a value of shape {shape_text(initial.shape)} for the site '{name}', but "
            f"got {shape_text(value.shape)}. Pass one draw, as `guide.draw()` returns it."
        )
    return nn.Parameter(value.clone())


def _own_parameters(module: nn.Module, made: dict[Any, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that a module is to have, in the order of the net's; tied ones are one."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for attribute, prior in declared_samples(module).items():
        is_tied = getattr(prior, "is_tied", False)
        key = (id(prior.owner), prior.attribute) if is_tied else (id(module), attribute)
        if key in made:
            own[attribute] = made[key]
    for name in frozen_names(module):
        value = module.get_buffer(name)
        frozen = nn.Parameter(value, requires_grad=False)
        own[name] = made.setdefault((value.data_ptr(), value.shape), frozen)
    order = vars(module).get("parameter_names", ())
    return {name: own[name] for name in dict.fromkeys([*order, *own])}


def _make_plain(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give a module the class that it had, and parameters in place of sites and buffers."""
    removed = [*_prior_buffers(module), *frozen_names(module)]
    samples, listed = [*declared_samples(module)], vars(module).get("parameter_names")
    remove_hooks(module, (*PASS_HOOKS, *STATE_HOOKS))
    for name in _ADDED:
        vars(module).pop(name, None)
    make_plain_module(module)
    present = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    # A layer of this package stays a PyroModule, which takes a parameter that goes out of the store.
    removed += samples if listed is None else present
    for name in removed:
        delattr(module, name)
    for name, parameter in parameters.items():
        if listed is not None or name not in present:
            module.register_parameter(name, parameter)
    if isinstance(module, nn.RNNBase):
        list_weights(module)
