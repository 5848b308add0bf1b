"""Modules whose random parameters have values in a pass, and nowhere else."""

from collections.abc import Iterator
from typing import Any

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._pyro import (
    can_sample,
    declared_name,
    declared_samples,
    is_running,
    one_draw_around,
    site_name,
    values_of_pass,
)
from pyro_structvi.nn.pass_values import PassValues
from pyro_structvi.nn.unsampled import UnsampledParameter, refuse_outside_of_passes


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
        if name in declared_samples(self) and not can_sample(self, name):
            return _unsampled(self, name)
        return super().__getattr__(name)

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
        if not is_running(self) and one_draw_around() is None:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        modules = (
            self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]
        )
        named = _named_values(modules, remove_duplicate)
        for name, value in named:
            yield name, value
            _take_out(value)
            break
        for name, value in named:
            yield name, _take_out(value)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: no values of passes, and what hooks computed as plain tensors."""
        own = values_of_pass(self)
        if isinstance(own, PassValues):
            own.effects.undo()
        super().__getstate__()
        return {
            name: value.detach() if isinstance(value, Tensor) and not value.is_leaf else value
            for name, value in vars(self).items()
        }


def check_in_pass(module: PyroModule, name: str) -> None:
    """Raise a ``RuntimeError`` unless a pass says which draw of a random parameter is meant."""
    if not can_sample(module, name):
        refuse_outside_of_passes(declared_name(module, name))


def _unsampled(module: PyroModule, name: str) -> UnsampledParameter:
    """Return what stands for a random parameter, with the dtype and the device of its prior's buffers."""
    site, prior = declared_name(module, name), declared_samples(module)[name]
    if hasattr(prior, "is_tied"):
        return _unsampled(prior.owner, prior.attribute)
    buffers = module.named_buffers(recurse=False)
    like = next((value for key, value in buffers if key.startswith(f"{name}_")), None)
    initial = vars(module).get("initial_values", {}).get(name)
    shape = getattr(prior, "shape", None) if initial is None else initial.shape
    if like is None or shape is None:
        refuse_outside_of_passes(site)
    return UnsampledParameter(site, shape, like)


def parameter_names(module: nn.Module) -> list[str]:
    """Return the attributes of a module that are parameters, random ones too, in the net's order."""
    known = vars(module).get("parameter_names")
    known = declared_samples(module) if known is None else known
    own = nn.Module.named_parameters(module, recurse=False, remove_duplicate=False)
    return list(dict.fromkeys([*known, *(name for name, _ in own)]))


def _named_values(modules: Any, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}
    for path, module in modules:
        for attribute in parameter_names(module):
            value = getattr(module, attribute)
            if remove_duplicate and id(value) in seen:
                continue
            seen[id(value)] = value
            yield (f"{path}.{attribute}" if path else attribute), value


def _take_out(value: Any) -> Any:
    """Return a tensor in place of one that stands for a weight, for code that torch does not tell it."""
    take_out = getattr(value, "take_out", None)
    return value if take_out is None else take_out()
