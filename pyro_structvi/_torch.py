"""Private parts of torch, each with its use and with what breaks without it."""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode


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
