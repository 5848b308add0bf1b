"""A random parameter where no pass says which draw of it is meant: a shape without values."""

from collections.abc import Callable, Iterator
from typing import Any, Never, Self

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import (
    can_sample,
    declared_name,
    declared_samples,
    keep_values_in,
    lists_values,
    site_name,
    values_of_pass,
)
from pyro_structvi._torch import METADATA, forward_hooks, take_apart, without_storage
from pyro_structvi.nn.pass_values import PassValues
from pyro_structvi.weights.torch_distributions import example_of


class UnsampledParameter(Tensor):
    """A tensor that has shape, dtype and device, and that raises where its values are asked for."""

    site: str

    def __new__(cls, site: str, shape: torch.Size, like: Tensor) -> Self:
        """Make the tensor for a site, with the dtype and the device of ``like``."""
        unsampled = without_storage(cls, shape, like)
        unsampled.site = site
        return unsampled

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show what is known of it."""
        return f"UnsampledParameter(site='{self.site}', shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what is known without values; a detached one is one still."""
        if func in METADATA or func is Tensor.data_ptr:
            return super().__torch_function__(func, types, args, kwargs or {})
        return args[0] if func in _DETACHING else cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        """Say what to do in place of asking for values."""
        refuse(next(each.site for each in nested_tensors([args, kwargs]) if isinstance(each, cls)))


_DETACHING = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


def refuse(site: str) -> Never:
    """Raise the error about values that are asked for outside of passes."""
    raise RuntimeError(
        f"The parameter '{site}' is random, and no pass says which draw of it is meant. Predict by "
        "`predict(model, guide, x)`; take a plain net, which generates, merges and saves, by "
        "`guide.to_net()`; call the model inside of `with guide.sampled():` for one draw; for prior "
        "draws pass the model to `pyro.infer.Predictive`."
    )


class RandomModule(PyroModule):
    """A PyroModule whose random parameters are read in passes of the model only.

    Pyro draws a parameter that is read elsewhere from its prior, and a net that predicts, merges or is
    saved outside of a guide would be one of prior draws.
    """

    _refused = ("save_pretrained", "push_to_hub")

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "A net with random parameters has no weights to be saved as those of a pretrained net. Save "
            "`guide.to_net()`, or keep the posterior by `guide.state_dict()`."
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute; of a random parameter outside of passes a tensor without values."""
        if name not in declared_samples(self) or can_sample(self, name):
            return super().__getattr__(name)
        prior = declared_samples(self)[name]
        if not hasattr(prior, "sample"):
            prior = getattr(prior, "at_median", prior)(self)
        return UnsampledParameter(declared_name(self, name), prior.shape(), example_of(prior))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor in place of a random parameter stays there for one pass."""
        is_value = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_value and name in declared_samples(self):
            check_in_pass(self, name)
            values_of_pass(self)[site_name(self, name)] = value
        else:
            super().__setattr__(name, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield parameters by name; in a pass random and frozen ones too, in the net's own order.

        Code that asks for a second one reads values, and not only a device. All are drawn then.
        """
        if not lists_values(self):
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        own = [(prefix, self)]
        modules = self.named_modules(None, prefix, remove_duplicate) if recurse else own
        named = _named_values(modules, remove_duplicate)
        for name, value in named:
            yield name, value
            _taken_out(value)
            break
        for name, value in named:
            yield name, _taken_out(value)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of, without what passes have left."""
        values = values_of_pass(self)
        if isinstance(values, PassValues):
            values.effects.undo()
        super().__getstate__()
        own = vars(self).items()
        computed = {k: v.detach() for k, v in own if isinstance(v, Tensor) and not v.is_leaf}
        return vars(self) | computed


def check_in_pass(module: PyroModule, name: str) -> None:
    """Raise a ``RuntimeError`` unless a pass says which draw of a random parameter is meant."""
    if not can_sample(module, name):
        refuse(declared_name(module, name))


def _named_values(modules: Any, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    """Yield what modules have in place of the parameters of the net, or of their own."""
    seen: dict[int, Any] = {}
    for path, module in modules:
        known = vars(module).get("parameter_names")
        known = declared_samples(module) if known is None else known
        own = dict(nn.Module.named_parameters(module, "", False, False))
        for attribute in dict.fromkeys([*known, *own]):
            value = getattr(module, attribute)
            if not remove_duplicate or id(value) not in seen:
                seen[id(value)] = value
                yield (f"{path}.{attribute}" if path else attribute), value


def _taken_out(value: Any) -> Any:
    """Return the tensor itself where a value stands for one."""
    return getattr(value, "materialize", lambda: value)()


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
