"""Training mode for what is trained, and for nothing else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
from torch import nn

from pyro_structvi._pyro import declared_samples
from pyro_structvi._torch import own_tensors


@contextmanager
def training_mode(model: Callable[..., Any], guide: nn.Module) -> Iterator[None]:
    """Put model and guide into training mode in this block, but for frozen parts in evaluation mode."""
    roots = [root for root in (poutine.unwrap(model), guide) if isinstance(root, nn.Module)]
    modes = [(part, part.training) for root in roots for part in root.modules()]
    try:
        for root in roots:
            _train(root)
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _train(module: nn.Module) -> None:
    if not module.training and _is_frozen(module):
        return
    module.training = True
    for child in module.children():
        _train(child)


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has tensors, and none that is trained or sampled."""
    parts = [*module.modules()]
    has_tensors = any(True for part in parts for _ in own_tensors(part))
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    return has_tensors and not is_trained and not any(map(declared_samples, parts))
