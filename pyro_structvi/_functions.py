"""The variables that a function names: its globals, and those of the code around it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import nn


def modules_named_by(function: Any) -> Iterator[nn.Module]:
    """Yield a module itself, the modules that a function names, and the module of a method."""
    for value in (function, getattr(function, "__self__", None), *named_by(function).values()):
        if isinstance(value, nn.Module):
            yield value


def named_by(function: Any) -> dict[str, Any]:
    """Return the globals and the closed-over variables that a function names, if they have values."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    found = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has none yet
            found[name] = cell.cell_contents
    return found
