"""Modules whose random parameters have values in a pass, and nowhere else."""

from collections.abc import Iterator
from typing import Any

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._pyro import (
    can_sample,
    declared_name,
    declared_samples,
    lists_values,
    site_name,
    values_of_pass,
)
from pyro_structvi.distributions.medians import example_of
from pyro_structvi.nn.pass_values import PassValues
from pyro_structvi.nn.unsampled import UnsampledParameter, refuse


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
    return getattr(value, "take_out", lambda: value)()
