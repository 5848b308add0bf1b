"""The state that a step depends on, the state that it changes, and what puts it back."""

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._nested import modules_reached_by, named_by
from pyro_structvi._pyro import unwrapped
from pyro_structvi._torch import (
    all_modules,
    forward_hooks,
    has_overlap,
    hook_numbers,
    made_by_hooks,
    own_tensors,
)
from pyro_structvi.nn.random_module import buffers_that_change
from pyro_structvi.sites.family import Family
from pyro_structvi.sites.latent_site import LatentSite

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
BY_IDENTITY = (Tensor, nn.Module, ModuleType, FunctionType, type, LatentSite, Family)
LIBRARIES = {"torch", "pyro", "pyro_structvi"}
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
MOST = 100  # values of a container or an array, and objects, that are looked at before each step
# Attributes of every module, lists that torch makes of named tensors, and what guides keep of these.
OF_TENSORS = {*vars(PyroModule())} - {"training"} | {"_flat_weights", "_flat_weight_refs", "_kept"}


State = dict[str, tuple[tuple[Hashable, ...], ...]]  # pairs by place


class Same:
    """A key of an object by identity, which keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def saved(
    tensors: Iterable[Tensor], generators: Iterable[torch.Generator] = ()
) -> Callable[[], None]:
    """Return a function that puts the present values back."""
    # Operations write neither into inference tensors nor into several elements in one place.
    written = (each for each in tensors if not (each.is_inference() or has_overlap(each)))
    copies = [(each, each.detach().clone()) for each in written]
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for generator, state in states:
            generator.set_state(state)

    return restore


class Modules:
    """The modules of model and guide, as callables, owners of methods, or variables that these name."""

    def __init__(self, parts: Sequence[Callable[..., Any]]) -> None:
        self._roots = [root for part in parts for root in modules_reached_by(part)]
        self._functions = [unwrapped(part) for part in parts]

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over all modules."""
        for root in self._roots:
            yield from all_modules(root)

    def tensors(self) -> list[Tensor]:
        """Return all their parameters and buffers."""
        return [tensor for module in self for tensor in own_tensors(module).values()]

    def state(self, with_memory: bool = False) -> State:
        """Return what a pass depends on, as pairs of name and value by place.

        That is modules, hooks, attributes and what these hold, and tensors apart from their values.
        ``id`` stands for parameters and buffers as long as they are alive. Variables of methods and
        hooks belong to it ``with_memory`` only, as all that a pass may leave for the next one.
        """
        identity, found = Same if with_memory else id, _Contents(math.inf if with_memory else MOST)
        state: State = {}
        for place, function in zip(("the model", "the guide"), self._functions, strict=True):
            state[place] = found.pairs(named_by(function))
        for number, module in enumerate(self):
            computed = made_by_hooks(module)
            known = OF_TENSORS | computed if computed else OF_TENSORS
            tensors = [
                (name, identity(value), value.requires_grad, value.data_ptr())
                for name, value in own_tensors(module).items()
            ]
            hooks = "hooks", module, *hook_numbers(module)
            place = f"module {number}, a {type(module).__name__}"
            state[place] = (*found.pairs(vars(module), known), *tensors, hooks)
            if with_memory:
                state[place] += (("hooks", found.of(forward_hooks(module))),)
        if with_memory:
            state |= self._outside(found)
        return state

    def _outside(self, found: "_Contents") -> State:
        """Return variables that functions name, and generators of random numbers, by place."""
        methods = [each for module in self for each in _functions_of(module)]
        named = [named_by(each) for each in (*self._functions, *methods)]
        owners = [getattr(function, "__self__", None) for function in self._functions]
        objects = dict(zip(("model", "guide"), owners, strict=True))
        of_numpy: Any = np.random.get_state()  # noqa: NPY002, that is the one to look at
        return {
            "the variables outside": tuple([
                pair for own in (objects, *named) for pair in found.pairs(own)
            ]),
            "Python's `random`": (("state", random.getstate()),),
            "NumPy's `random`": (("state", of_numpy[1].tobytes(), *of_numpy[2:]),),
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


class _Contents:
    """Keys of values: tensors, modules and functions by identity, other objects by their attributes too.

    Of larger containers than ``most``, and of more objects, only the identity counts. Without a limit
    the parts by which Python copies an object count, such as the state of a generator.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._known: dict[int, tuple[int, Any]] = {}  # numbers, and the values so that they stay

    def pairs(
        self, named: Mapping[Any, Any], left_out: Collection[str] = frozenset()
    ) -> tuple[tuple[Any, ...], ...]:
        """Return names with types and keys."""
        return tuple([
            (name, type(value), value if type(value) in PLAIN else self.of(value))
            for name, value in named.items()
            if name not in left_out
        ])

    def of(self, value: Any) -> Hashable:
        """Return the key of a value that is not plain."""
        key: Hashable = Same(value)
        if isinstance(value, BY_IDENTITY):
            return key
        if id(value) in self._known:  # maybe in itself
            return self._known[id(value)][0]
        self._known[id(value)] = len(self._known), value
        if isinstance(value, CONTAINERS):
            if len(value) > self._most:
                return key
            return self.pairs(value if isinstance(value, dict) else dict(enumerate(value)))
        if isinstance(value, (np.ndarray, np.generic)):
            is_small = value.size <= self._most
            return (value.dtype, value.shape, value.tobytes()) if is_small else key
        kind: Any = type(value)
        if kind.__hash__ not in (None, object.__hash__):
            with suppress(TypeError):
                key = frozenset([value])  # which compares only values of one hash
        if len(self._known) > 2 * self._most:  # an object has a dictionary
            return key
        parts = self._parts(value) if self._most == math.inf else None
        return key, self.of(object.__getstate__(value) or ()), parts

    def _parts(self, value: Any) -> Hashable:
        try:
            return self.of(value.__reduce_ex__(4))
        except Exception:  # as of `itertools.count` in Python 3.14
            return repr(value)


def key_of(value: Any) -> Hashable:
    """Return a key of what an object holds, which is equal as long as that is."""
    return _Contents(MOST).of(value)


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module, and its methods that torch, Pyro and this package do not define."""
    yield from forward_hooks(module)
    kinds = [
        kind for kind in type(module).__mro__ if kind.__module__.split(".")[0] not in LIBRARIES
    ]
    for own in (module, *kinds):
        yield from (each for each in vars(own).values() if isinstance(each, FunctionType))
