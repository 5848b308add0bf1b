"""Modules that sample every site they declare in each pass, whether the pass uses it or not."""

from typing import Any

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._pyro import declared_samples, keep_values_in, values_of_pass
from pyro_structvi._torch import forward_hooks, take_apart
from pyro_structvi.nn.pass_values import PassValues
from pyro_structvi.nn.random_module import check_in_pass


def sample_every_site(module: nn.Module) -> None:
    """Let each call of a module sample all sites that it and its parts declare, before anything else.

    A weight is a part of the model also where a pass does not use it: an expert that no example is
    routed to, a layer that is dropped or comes after an early exit. So its prior meets its posterior in
    every pass, and the bound is one of the whole posterior.

    The values of a pass are kept for as long as it can be differentiated, so that what activation
    checkpointing computes again in the backward pass has the same weights.

    Args:
        module: The module; one that is not a ``PyroModule`` declares no sites, and stays as it is.
    """
    if isinstance(module, PyroModule) and _sample_declared not in forward_hooks(module):
        module.register_forward_pre_hook(_sample_declared)
        module.register_forward_hook(_keep_values, always_call=True)


def refuse_outside(module: nn.Module) -> None:
    """Let a call of a module raise where no pass says which draw of its random parameters is meant."""
    module.register_forward_pre_hook(_check_in_pass)


def _check_in_pass(module: nn.Module, args: Any) -> None:
    for part in module.modules():
        for attribute in declared_samples(part):
            check_in_pass(part, attribute)
            return


def _sample_declared(module: PyroModule, args: Any) -> None:
    own = values_of_pass(module)
    if not isinstance(own, PassValues):
        own = PassValues(own)
        keep_values_in(module, own)
    own.effects.begin(module)
    read_declared(module)


def read_declared(module: nn.Module) -> None:
    """Read all sites that a module and its parts declare, which samples those that have no value yet."""
    for part in module.modules():
        for attribute in declared_samples(part):
            getattr(part, attribute)


def _keep_values(module: PyroModule, args: Any, outputs: Any) -> None:
    own = values_of_pass(module)
    if not isinstance(own, PassValues):  # the pass has not begun
        return
    own.effects.end(module)
    for output in take_apart(outputs)[0]:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            own.keep_for_backward(output)


PASS_HOOKS = (_check_in_pass, _sample_declared, _keep_values)
