"""The state that a step depends on, the state that it changes, and what puts it back."""

import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._functions import modules_named_by, named_by
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
from pyro_structvi.weights.site_role import SiteUse

PLAIN = frozenset({bool, int, float, str, type(None)})
STEERING = PLAIN | {BuiltinFunctionType, FunctionType, MethodType}
BY_IDENTITY = (Tensor, nn.Module, ModuleType, FunctionType, type)
UNCHANGING = (*BY_IDENTITY, LatentSite)
LIBRARIES = {"torch", "pyro", "pyro_structvi"}
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
MOST_VALUES = 100  # in a container or an array that is looked at before each step
MOST_OBJECTS = 100  # with attributes that are looked at before each step
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
    return not (tensor.is_inference() or has_overlap(tensor))


class Modules:
    """The modules of model and guide, as callables, owners of methods, or variables that these name.

    Args:
        parts: Model and guide.
    """

    def __init__(self, parts: Iterable[Callable[..., Any]]) -> None:
        self._functions = [unwrapped(part) for part in parts]
        self._roots = [root for function in self._functions for root in modules_named_by(function)]

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
        identity, found = Same if with_memory else id, _Contents()
        state: State = {}
        for place, function in zip(("the model", "the guide"), self._functions, strict=True):
            named = named_by(function).items()
            state[place] = tuple([(name, found.of(value)) for name, value in named])
        contents = memory_of if with_memory else found.of
        for number, module in enumerate(self):
            computed = made_by_hooks(module)
            known = OF_TENSORS | computed if computed else OF_TENSORS
            pairs: list[tuple[Any, ...]] = [
                (name, type(value), value if type(value) in PLAIN else contents(value))
                for name, value in vars(module).items()
                if name not in known
            ]
            pairs += [
                (name, identity(value), value.requires_grad, value.data_ptr())
                for name, value in own_tensors(module).items()
            ]
            pairs.append(("hooks", module, *hook_numbers(module)))
            if with_memory:
                pairs.append(("hooks", memory_of(forward_hooks(module))))
            state[f"module {number}, a {type(module).__name__}"] = (*pairs,)
        if with_memory:
            state |= self._outside()
        return state

    def _outside(self) -> State:
        """Return variables that functions name, and generators of random numbers, by place."""
        methods = [each for module in self for each in _functions_of(module)]
        named = [named_by(each) for each in (*self._functions, *methods)]
        objects = dict(zip(("model", "guide"), self._functions, strict=True))  # of bound methods
        found = [pair for own in (objects, *named) for pair in own.items()]
        variables = [(name, memory_of(value)) for name, value in found]
        of_numpy: Any = np.random.get_state()  # noqa: NPY002, that is the one to look at
        return {
            "the variables outside": (*variables,),
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
    """Keys of all that attributes hold: plain values, other objects by identity and attributes."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # numbers of containers and objects, by ``id``
        self._num_objects = 0

    def of(self, value: Any) -> Hashable:
        """Return the key of a value."""
        kind: Any = type(value)
        if kind in STEERING or isinstance(value, Family):
            own: Hashable = value
            return own
        if isinstance(value, UNCHANGING):
            return Same(value)
        if isinstance(value, SiteUse):
            return (*vars(value).values(),)
        if id(value) in self._known:  # maybe in itself
            return self._known[id(value)]
        self._known[id(value)] = len(self._known)
        if isinstance(value, CONTAINERS) and len(value) <= MOST_VALUES:
            return kind, self._items(value) if isinstance(value, dict) else self._each(value)
        if isinstance(value, (np.ndarray, np.generic)) and value.size <= MOST_VALUES:
            return value.dtype, value.shape, value.tobytes()
        key: Hashable = Same(value)
        if kind.__hash__ is not object.__hash__:
            with suppress(TypeError):
                key = frozenset([value])  # which compares only values of one hash
        return key, *self._attributes(value)

    def _attributes(self, value: Any) -> Iterator[Hashable]:
        """Yield the keys of an object's attributes and slots."""
        if self._num_objects < MOST_OBJECTS:
            self._num_objects += 1
            state: Any = object.__getstate__(value)
            parts = state if isinstance(state, tuple) else (state,)
            yield from (self._items(own) for own in parts if own)

    def _items(self, named: dict[Any, Any]) -> Hashable:
        return (*named,), self._each(named.values())

    def _each(self, values: Iterable[Any]) -> Hashable:
        return tuple([
            (type(own), own if type(own) in STEERING else self.of(own)) for own in values
        ])


class _Pickler(pickle.Pickler):
    """Finds what an object holds: a digest of values, and the rest by identity."""

    def __init__(self) -> None:
        self.values = blake2b()
        self.others: list[Any] = []
        super().__init__(SimpleNamespace(write=self.values.update))

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, BY_IDENTITY):
            return None
        self.others.append(value)
        return len(self.others)


def memory_of(value: Any) -> Hashable:
    """Return a key of all that an object holds, as far as it can be pickled, or shows by ``repr``."""
    pickler = _Pickler()
    with suppress(Exception), warnings.catch_warnings():  # of any object's own code
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pickler.dump(value)
        except Exception:  # as of `itertools.count` in Python 3.14
            pickler.values.update(repr(value).encode())
    return pickler.values.digest(), *map(Same, pickler.others)


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks of a module, and its methods that torch, Pyro and this package do not define."""
    yield from forward_hooks(module)
    kinds = [
        kind for kind in type(module).__mro__ if kind.__module__.split(".")[0] not in LIBRARIES
    ]
    for own in (module, *kinds):
        yield from (each for each in vars(own).values() if isinstance(each, FunctionType))
