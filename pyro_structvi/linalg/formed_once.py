"""The rule of caches: an object forms a value once, in the gradient mode it was made in."""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def formed_once(form: Callable[[Any], T]) -> cached_property[T]:
    """Make a method a property, computed at its first use and kept with its graph.

    The object's ``_with_grad`` is the gradient mode it was made in.
    """

    @wraps(form)
    def in_own_mode(owner: Any) -> T:
        with torch.set_grad_enabled(owner._with_grad):
            return form(owner)

    return cached_property(in_own_mode)
