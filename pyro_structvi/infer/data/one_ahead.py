"""Items that are made when they are asked for, or one ahead in a thread."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class InTurn(Generic[T]):
    """Takes the items when they are asked for."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items

    def take(self) -> T:
        """Return the next item, or raise a ``StopIteration``."""
        return next(self._items)

    def start(self) -> None:
        """Have the next item made, if that can be done meanwhile."""

    def wait(self) -> int:
        """Wait until what was started is there; return how many items are."""
        return 0

    def close(self) -> None:
        """Take no more."""


class OneAhead(InTurn[T]):
    """Takes the items in a thread, which can have the next one ready while the last is used."""

    def __init__(self, items: Iterator[T]) -> None:
        super().__init__(items)
        self._thread = ThreadPoolExecutor(1)
        self._upcoming: Future[list[T]] | None = None

    def take(self) -> T:
        """Return the next item, or raise a ``StopIteration``."""
        try:
            self.start()
            assert self._upcoming is not None
            ready = self._upcoming.result()
        except BaseException:
            self.close()
            raise
        if not ready:
            self.close()
            raise StopIteration
        self._upcoming = None
        return ready.pop()

    def start(self) -> None:
        """Have the thread make the next item, if it does not yet."""
        if self._upcoming is None:
            self._upcoming = self._thread.submit(lambda: [*itertools.islice(self._items, 1)])

    def wait(self) -> int:
        """Wait until what was started is there; return how many items are."""
        if self._upcoming is None:
            return 0
        wait([self._upcoming])
        return 0 if self._upcoming.exception() else len(self._upcoming.result())

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
