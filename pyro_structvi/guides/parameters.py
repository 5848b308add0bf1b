"""Showing a guide's parameters to Pyro: its handlers, and the param store."""

import weakref
from collections.abc import Iterable

import pyro
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, nn

from pyro_structvi._pyro import mirror_parameter


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
            mirror_parameter(key, parameter)
        _declare(parameter, name=key)


def _identity(parameter: Tensor) -> Tensor:
    return parameter


_declare = effectful(_identity, type="param")


def module_key(name: str) -> str:
    """Return a site's name as a key of a module dictionary: no dots, and none of its attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"{key}/" if hasattr(nn.ModuleDict, key) or key == "training" else key
