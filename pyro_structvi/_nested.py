"""Tensors in containers, such as inputs of nets, and modules and variables that a program names."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from pyro_structvi._pyro import without_handlers

MOST_VALUES = 100  # of a container, in which modules are looked for
_HOLDERS = (nn.Module, partial, dict, list, tuple)


def map_nested(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to each tensor; any mapping, such as a ``BatchEncoding``, becomes a dict."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_nested(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_nested(function, item) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    return value


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from nested_tensors(item)


def modules_reached_by(program: Any) -> Iterator[nn.Module]:
    """Yield the modules of a program: itself, or those that it is bound to, has as attributes or names.

    A function that a function beside it names belongs to it, and a container of few values, too.
    """
    waiting, known = [program], set[int]()
    while waiting:
        each = without_handlers(waiting.pop())
        if id(each) in known:
            continue
        known.add(id(each))
        if isinstance(each, nn.Module):
            yield each
        elif isinstance(each, partial):
            waiting += (each.func, *each.args, *each.keywords.values())
        elif isinstance(each, (dict, list, tuple)):
            values = each.values() if isinstance(each, dict) else each
            if len(values) <= MOST_VALUES:
                waiting += (value for value in values if isinstance(value, _HOLDERS))
        elif callable(each):
            waiting += _parts_of(each)


def _parts_of(function: Any) -> Iterator[Any]:
    """Yield what may be or hold a module: the attributes of an object, and what a function names."""
    owner = getattr(function, "__self__", function)
    attributes = getattr(owner, "__dict__", {}).values()
    named = named_by(function).values()
    yield from (value for value in (owner, *attributes, *named) if isinstance(value, _HOLDERS))
    for value in named:
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield value


def named_by(function: Any) -> dict[str, Any]:
    """Return the globals and the closed-over variables that a function names, if they have values.

    The functions and comprehensions inside of it belong to it.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    names = (name for each in _codes_in(code) for name in each.co_names)
    found = {name: function.__globals__.get(name) for name in names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has none yet
            found[name] = cell.cell_contents
    return found


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes_in(value)
