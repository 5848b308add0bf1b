"""Interrupts from the keyboard that wait for the end of a step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], bool]]:
    """Let an interrupt wait, so that no step is left half-done; a second one does not wait.

    Handlers of others are left in place, and threads, which Python does not interrupt, as they are.

    Yields:
        A function that says whether there was an interrupt.
    """
    asked: list[int] = []
    usual = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not usual
    ):
        yield lambda: False
        return

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, usual)
