"""The state that a step depends on, the state that it changes, and what puts it back."""

import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._torch import all_modules, hook_numbers, made_by_hooks, own_tensors, take_apart
from pyro_structvi.nn.random_module import buffers_that_change
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.sites.structured import StructuredGuide

PLAIN = frozenset({bool, int, float, str, type(None)})
STEERING = PLAIN | {BuiltinFunctionType, FunctionType, MethodType}
CONTAINERS = frozenset({dict, list, tuple})
MOST_VALUES = 100  # in a container that is looked at before each step
_OF_TORCH = {*vars(nn.Module())} - {"training"} | {"_flat_weights"}  # lists of named tensors


def saved(
    tensors: Iterable[Tensor], generators: Iterable[torch.Generator] = ()
) -> Callable[[], None]:
    """Return a function that puts the present values back."""
    copies = [(each, each.detach().clone()) for each in tensors if _can_be_written(each)]
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for generator, state in states:
            generator.set_state(state)

    return restore


def _can_be_written(tensor: Tensor) -> bool:
    """Whether operations may write: not into inference tensors or several elements in one place."""
    if tensor.is_inference() or tensor.layout != torch.strided:
        return not tensor.is_inference()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(size > 1 and stride == 0 for size, stride in pairs)


class Modules:
    """The modules of model and guide, as callables, owners of methods, or variables that these name.

    Args:
        parts: Model and guide.
    """

    def __init__(self, parts: Iterable[Callable[..., Any]]) -> None:
        self._functions = [poutine.unwrap(part) for part in parts]
        self._roots = [root for function in self._functions for root in _modules_of(function)]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over all modules."""
        for root in self._roots:
            yield from all_modules(root)

    def state(self) -> list[Hashable]:
        """Return the state that a pass depends on: modules, tensors, hooks, plain values and functions.

        Objects are identified by ``id`` as long as they are alive, which :meth:`parts` is for.
        """
        state: list[Hashable] = [*self._known_to_functions().values()]
        for module in self:
            state.append(id(module))
            state += hook_numbers(module)
            own = vars(module)
            state += [value for value in own.values() if type(value) in STEERING]
            if isinstance(module, SitePosterior):
                state.append(module.family)
            elif isinstance(module, StructuredGuide):
                state.append(id(module.uses))
            else:
                held = [each for name, each in own.items() if name not in _OF_TORCH]
                state += _contents(each for each in held if type(each) in CONTAINERS)
            for tensor in own_tensors(module):
                state += [id(tensor), tensor.requires_grad, tensor.data_ptr()]
        return state

    def parts(self) -> list[object]:
        """Return the objects that a state identifies by ``id``."""
        uses = [module.uses for module in self if isinstance(module, StructuredGuide)]
        return [*self, *uses, *self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Return all their parameters and buffers."""
        return [tensor for module in self for tensor in own_tensors(module)]

    def memory(self) -> dict[str, Hashable]:
        """Return the values that a pass may leave for the next one, by name."""
        of_numpy: Any = np.random.get_state()  # noqa: NPY002, that is the one to look at
        values = self._known_to_functions()
        values["the state of Python's `random`"] = random.getstate()
        values["the state of NumPy's generator"] = of_numpy[1].tobytes(), *of_numpy[2:]
        for number, module in enumerate(self):
            # Guides cache functions of their parameters.
            is_others = not isinstance(module, (SitePosterior, StructuredGuide))
            known, where = _OF_TORCH | made_by_hooks(module), f"of module {number}"
            own = {name: value for name, value in vars(module).items() if name not in known}
            for name, value in (own | dict(module.named_buffers(recurse=False))).items():
                leaves = take_apart(value)[0] if is_others or type(value) in PLAIN else ()
                tensors = frozenset(leaf for leaf in leaves if isinstance(leaf, Tensor))
                plain = tuple(leaf for leaf in leaves if type(leaf) in PLAIN)
                values[f"`{name}` {where}, a {type(module).__name__}"] = tensors, plain
        return values

    def _known_to_functions(self) -> dict[str, Hashable]:
        """Return the plain globals and closed-over variables of model and guide, by name."""
        return {
            f"`{name}` outside of `{function.__name__}`": value
            for function in self._functions
            for name, value in _named_by(function).items()
            if type(value) in PLAIN
        }

    def saved(self) -> Callable[[], None]:
        """Return a function that puts back the buffers that a pass may change."""
        places = [(part, name, value) for part in self for name, value in buffers_that_change(part)]
        restore_values = saved(value for *_, value in places)

        def restore() -> None:
            restore_values()
            for module, name, buffer in places:
                setattr(module, name, buffer)

        return restore


def _contents(values: Iterable[Any]) -> Iterator[Hashable]:
    """Yield the plain values and functions in containers that are not large."""
    for value in values:
        kind = type(value)
        if kind in STEERING:
            yield value
        elif kind in CONTAINERS and len(value) <= MOST_VALUES:
            yield from _contents(value.values() if kind is dict else value)


def _modules_of(function: Any) -> Iterator[nn.Module]:
    for value in (function, getattr(function, "__self__", None), *_named_by(function).values()):
        if isinstance(value, nn.Module):
            yield value


def _named_by(function: Any) -> dict[str, Any]:
    """Return the globals and the closed-over variables that a function names, if they have values."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    found = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has none yet
            found[name] = cell.cell_contents
    return found
