"""What a long job in several processes prints: lines, rows as they come, and one line of progress."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch
from tqdm import tqdm


class Progress:
    """Lines above one line of progress; without a terminal, the progress is a line now and then.

    Args:
        total: How many steps will be taken, in all processes.
        done: How many have been taken.
    """

    EVERY = 5.0  # seconds

    def __init__(self, total: int, done: Any) -> None:
        self._bar = tqdm(
            desc="fits", total=total, leave=False, unit=" steps", disable=not sys.stderr.isatty()
        )
        self._total, self._done = total, done
        self._start = self._last = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if error[0] is None:
            self.write(f"\nThat took {time.monotonic() - self._start:.0f} s.")

    def write(self, line: str) -> None:
        """Print a line above the progress."""
        tqdm.write(line, sys.stdout)
        sys.stdout.flush()

    def show(self) -> None:
        """Show how far the fits are."""
        self._bar.update(self._done.value - self._bar.n)
        now = time.monotonic()
        if self._bar.disable and now - self._last > self.EVERY:
            self._last = now
            share = self._done.value / self._total
            print(f"{share:4.0%} of all steps, {now - self._start:.0f} s", file=sys.stderr)


class Table:
    """Prints rows as they come, in columns as wide as what is known to come."""

    def __init__(
        self, progress: Progress, header: Sequence[str], titles: Iterable[str], width: int = 10
    ) -> None:
        self._progress = progress
        self._widths = [max(map(len, titles)), *(max(len(cell), width) for cell in header[1:])]
        self.add(header)
        self.add(["-" * width for width in self._widths])

    def add(self, row: Sequence[str]) -> None:
        """Print a row."""
        cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
        self._progress.write("  ".join(cells).rstrip())


# ---- processes -----------------------------------------------------------------------------------

steps_taken: Any = None  # of all processes


def begin_process(counter: Any) -> None:
    """Keep what counts the steps of all processes."""
    global steps_taken
    steps_taken = counter
    torch.set_num_threads(1)  # nets this small only lose by more


def count_steps(history: Any) -> None:
    """Count the steps of a fit."""
    with steps_taken.get_lock():
        steps_taken.value += len(history.elbo)


def as_they_come(fits: dict[str, Future[Any]], progress: Progress) -> Iterator[tuple[str, Any]]:
    """Yield what the processes return, by title, as soon as it is there."""
    title_of = {future: title for title, future in fits.items()}
    while title_of:
        done, _ = wait(title_of, timeout=0.2, return_when=FIRST_COMPLETED)
        progress.show()
        for future in [each for each in title_of if each in done]:
            yield title_of.pop(future), future.result()
