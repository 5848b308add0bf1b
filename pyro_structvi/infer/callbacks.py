"""Functions of the user's that see the history after each step, and may end the training."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch

from pyro_structvi._checks import Rule, brief
from pyro_structvi.infer.history import History
from pyro_structvi.infer.ranks import by_first_rank

Callbacks = Annotated[
    Sequence[Callable[..., Any]],
    Rule(
        "a list of functions of the history",
        lambda value: not any(isinstance(each, type) for each in value),
    ),
]


def call_all(callbacks: Callbacks, history: History) -> bool:
    """Call each with the history, on rank 0; return, on all ranks, whether one says to stop.

    Raises:
        TypeError: If one returns neither None nor a truth value.
    """
    if not callbacks:
        return False

    def calls() -> list[bool]:
        return [_call(number, each, history) for number, each in enumerate(callbacks)]

    return any(by_first_rank(calls))


def close_all(callbacks: Callbacks) -> None:
    """Call the method ``close`` of those that have one."""
    for each in callbacks:
        getattr(each, "close", lambda: None)()


def _call(number: int, callback: Callable[..., Any], history: History) -> bool:
    stops = callback(history)
    if stops is None or isinstance(stops, (bool, np.bool_)):
        return bool(stops)
    if isinstance(stops, torch.Tensor) and stops.dtype == torch.bool and stops.numel() == 1:
        return bool(stops)
    raise TypeError(
        f"`callbacks[{number}](history)` must return None, or True to stop, but returned "
        f"{brief(stops)}. Write `return bool(...)`, or return nothing."
    )
