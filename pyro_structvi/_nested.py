"""Inputs of nets: a tensor, or tensors in dicts, lists and tuples, each with the examples first."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


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
