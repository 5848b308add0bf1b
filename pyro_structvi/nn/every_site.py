"""Modules that sample every site they declare in each pass, whether the pass uses it or not."""

from typing import Any

from pyro.nn import PyroModule
from torch import nn

from pyro_structvi._pyro import declared_samples
from pyro_structvi._torch import forward_hooks


def sample_every_site(module: nn.Module) -> None:
    """Let each call of a module sample all sites that it and its parts declare, before anything else.

    A weight is a part of the model also where a pass does not use it: an expert that no example is
    routed to, a layer that is dropped or comes after an early exit. So its prior meets its posterior in
    every pass, and the bound is one of the whole posterior.

    Args:
        module: The module; one that is not a ``PyroModule`` declares no sites, and stays as it is.
    """
    if isinstance(module, PyroModule) and _sample_declared not in forward_hooks(module):
        module.register_forward_pre_hook(_sample_declared)


def _sample_declared(module: nn.Module, args: Any) -> None:
    for part in module.modules():
        for attribute in declared_samples(part):
            getattr(part, attribute)
