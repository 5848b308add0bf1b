"""Showing a guide's parameters to Pyro: its handlers, and the param store."""

import weakref
from collections.abc import Iterable

import pyro
from pyro.poutine.runtime import _PYRO_PARAM_STORE, am_i_wrapped, effectful
from torch import Tensor, nn
from torch.distributions import constraints


def declare_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Show parameters to Pyro's handlers, and mirror them in the param store if it is used.

    The parameters stay their module's own; the store's entries are these very tensors.

    Args:
        named_parameters: The parameters by their names in the store. Frozen ones are left out.
    """
    if not am_i_wrapped():
        return
    mirror = not pyro.settings.get("module_local_params")
    for key, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        parameter.__dict__["unconstrained"] = weakref.ref(parameter)
        if mirror:
            _mirror(key, parameter)
        _declare(parameter, name=key)


def _mirror(key: str, parameter: nn.Parameter) -> None:
    stale = _PYRO_PARAM_STORE._params.get(key)
    if stale is not None and stale is not parameter:  # let go of a former guide's
        _PYRO_PARAM_STORE._param_to_name.pop(stale, None)
    _PYRO_PARAM_STORE._params[key] = parameter
    _PYRO_PARAM_STORE._constraints[key] = constraints.real
    _PYRO_PARAM_STORE._param_to_name[parameter] = key


def _identity(parameter: Tensor) -> Tensor:
    return parameter


_declare = effectful(_identity, type="param")
