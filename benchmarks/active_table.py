"""The table of active learning, of a file of results."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.markdown import markdown
from benchmarks.rows import Row

ACTIVE = ("data", "method", "choice", "trial", "labels", "RMSE")


def curve(rows: Sequence[Row], data: str, method: str, choice: str) -> dict[int, float]:
    """Return the mean error over trials by the number of labels."""
    own = [row for row in rows if row[:3] == (data, method, choice)]
    counts = sorted({int(row[4]) for row in own})
    return {count: fmean(float(row[5]) for row in own if int(row[4]) == count) for count in counts}


def labels_needed(errors: dict[int, float], limit: float) -> float | None:
    """Return how many labels have this error, by a line between two rounds; None if no number has."""
    last: tuple[int, float] | None = None
    for count, error in errors.items():
        if error <= limit:
            if last is None:
                return float(count)
            share = (last[1] - limit) / (last[1] - error)
            return last[0] + share * (count - last[0])
        last = count, error
    return None


def active_table(rows: Sequence[Row]) -> str:
    """Return the errors of random labels and of chosen ones, and the labels that the choice saves."""
    body = []
    for data, method in dict.fromkeys(row[:2] for row in rows):
        random, chosen = (curve(rows, data, method, choice) for choice in ("random", "variance"))
        if not random or not chosen:
            continue
        end = max(random)
        needed = labels_needed(chosen, random[end])
        body.append([
            data,
            method,
            f"{random[end]:.3g}",
            f"{chosen[max(chosen)]:.3g}",
            "" if needed is None else f"{needed:.0f} of {end}",
        ])
    trials = len({row[3] for row in rows})
    head = ["data", "method", "random", "by variance", "labels for the error of random"]
    return f"Means of {trials} trials.\n\n{markdown(head, body)}"
