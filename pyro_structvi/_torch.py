"""Private parts of torch, each with its use and with what breaks without it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_map as tree_map  # as in torch.func, for nested arguments

T = TypeVar("T", bound=Tensor)


def inside_transform() -> bool:
    """Whether this code runs inside a transform of ``torch.func``, such as vmap.

    Torch has no public question for it. Without it a gradient written by hand that has no rule for a
    transform would raise under it, in place of torch's own operations.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether ``make_fx`` records what runs here, so that tensors' values may not steer Python.

    Without it a branch on a value would raise while a step is traced.
    """
    return get_proxy_mode() is not None


def without_storage(cls: type[T], shape: torch.Size, like: Tensor) -> T:
    """Return a tensor of a subclass that has a shape, and the dtype and device of ``like``, only.

    Torch documents the constructor for subclasses without giving it a public name. Without it a weight
    that has not been drawn would hold memory of a weight's size.
    """
    stand_in: T = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
    return stand_in


def read_metadata(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that reads a tensor's shape, dtype or device, past ``__torch_function__``.

    Without it the question for a shape would be answered by asking for the shape, without end.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)
