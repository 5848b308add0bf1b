"""Showing a guide's parameters to Pyro: its handlers, and the param store."""

import itertools
import weakref
from weakref import WeakValueDictionary

import pyro
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, nn

from pyro_structvi._pyro import forget_parameters, has_parameters, mirror_parameter

_NAMED: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()


def declare_parameters(guide: nn.Module) -> None:
    """Show a guide's parameters to Pyro's handlers, and mirror them in the param store if it is used.

    The parameters stay the guide's own; the store's entries are these very tensors, and leave it with
    the guide. Their names begin with the guide's class, and a number if another guide has that name.

    Args:
        guide: The guide. Frozen parameters are left out.
    """
    if not am_i_wrapped():
        return
    mirror = not pyro.settings.get("module_local_params")
    for key, parameter in guide.named_parameters(_name_of(guide)):
        if not parameter.requires_grad:
            continue
        parameter.__dict__["unconstrained"] = weakref.ref(parameter)
        if mirror:
            mirror_parameter(key, parameter)
        _declare(parameter, name=key)


def _name_of(guide: nn.Module) -> str:
    """Return the guide's name in the param store, which no other guide has that is alive and in it."""
    kind = type(guide).__name__
    for name in itertools.chain([kind], (f"{kind}_{number}" for number in itertools.count(2))):
        owner = _NAMED.get(name)
        if owner is guide:
            return name
        if owner is None or not has_parameters(f"{name}."):
            _NAMED[name] = guide
            weakref.finalize(guide, _forget, name).atexit = False
            return name
    raise AssertionError


def _forget(name: str) -> None:
    if name not in _NAMED:  # a later guide may have the name
        forget_parameters(f"{name}.")


def _identity(parameter: Tensor) -> Tensor:
    return parameter


_declare = effectful(_identity, type="param")


def module_key(name: str) -> str:
    """Return a site's name as a key of a module dictionary: no dots, and none of its attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"{key}/" if hasattr(nn.ModuleDict, key) or key == "training" else key
