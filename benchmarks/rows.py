"""Files of results: rows of a CSV file, which a second run reads and goes on from."""

import csv
import fcntl
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, stdev

Row = tuple[str, ...]


class ResultsFile:
    """The rows that have been measured; each new one is kept at once.

    Several processes may add rows to one file: a lock keeps the rows of a call together.

    Args:
        path: A CSV file, or None: then rows are kept in memory only.
        header: Names of its columns, those of the key first.

    Raises:
        ValueError: If the file has other columns.
    """

    def __init__(self, path: Path | None, header: Row) -> None:
        self.path, self.header = path, header
        self.rows = read_rows(path, header) if path is not None and path.exists() else []

    def has(self, *key: str) -> bool:
        """Whether there is a row that begins with ``key``."""
        return any(row[: len(key)] == key for row in self.rows)

    def add(self, *rows: Row) -> None:
        """Print rows and write them."""
        self.rows += rows
        for row in rows:
            print(*row, flush=True)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", newline="") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                is_new = file.seek(0, 2) == 0
                csv.writer(file, lineterminator="\n").writerows([self.header] * is_new + [*rows])


def read_rows(path: Path, header: Row) -> list[Row]:
    """Return the lines of a file of results."""
    with path.open(newline="") as file:
        found, *rows = (tuple(row) for row in csv.reader(file))
    if found != header:
        raise ValueError(f"{path} must have the columns {header}, but has {found}.")
    return rows


def mean_with_error(values: Iterable[float], write: Callable[[float], str]) -> str:
    """Return the mean of runs and its standard error, or nothing where there are none."""
    values = list(values)
    if not values:
        return ""
    mean = write(fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {write(stdev(values) / math.sqrt(len(values)))}"
