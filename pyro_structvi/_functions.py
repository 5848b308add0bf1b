"""The variables that a function names: its globals, and those of the code around it."""

from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def modules_reached_by(function: Any) -> Iterator[nn.Module]:
    """Yield a module, or the modules of a function or method: those of its object, and that it names.

    Functions beside it that it names belong to it.
    """
    waiting, known = [function], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        named, owner = named_by(each).values(), getattr(each, "__self__", None)
        own = getattr(each if owner is None else owner, "__dict__", {}).values()
        yield from (value for value in (each, owner, *own, *named) if isinstance(value, nn.Module))
        functions = (value for value in named if isinstance(value, FunctionType))
        waiting += [value for value in functions if value.__module__ == each.__module__]


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
