"""The one rule of caches: an object forms a value once, in the gradient mode it was made in."""

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def formed_once(form: Callable[[Any], T]) -> cached_property[T]:
    """Make a method a property that is computed at its first use and kept with its graph.

    The object says by ``_with_grad`` whether gradients were enabled when it was made. So a value that is
    first looked at without gradients has them all the same, and the object serves one backward pass.
    """

    @wraps(form)
    def in_own_mode(owner: Any) -> T:
        with torch.set_grad_enabled(owner._with_grad):
            return form(owner)

    return cached_property(in_own_mode)
