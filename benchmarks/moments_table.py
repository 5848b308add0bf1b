"""The table of one-pass predictions against draws, of a file of results."""

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.markdown import markdown
from benchmarks.rows import Row

BIAS, RATIO, CLASSES = "bias", "ratio of standard deviations", "total variation"
UNTRAINED = "Untrained"
FULL, DRAWS, PASS = "one pass, full", "100 draws", "one pass"
HEAD = [
    "net",
    *("mean", "standard deviation", 'standard deviation, `covariance="full"`'),
    *("probabilities", "probabilities, 100 samples"),
]


def moments_table(rows: Sequence[Row]) -> str:
    """Return means of errors over guides, the largest errors of deviations, and what draws come to."""
    body = [net_cells(name, [row for row in rows if group(row[0]) == name]) for name in names(rows)]
    for number in (10, 100):
        # Of normal outputs: the mean of the absolute error of their moments by so many draws.
        mean = math.sqrt(2 / math.pi / number)
        body.append([f"{number:,} samples, normal outputs", f"{mean:.3f}", percent(mean / 2**0.5)])
    return markdown(HEAD, [row + [""] * (len(HEAD) - len(row)) for row in body])


def names(rows: Sequence[Row]) -> list[str]:
    """Return the names of rows, nets that are not trained before the others."""
    found = dict.fromkeys(group(row[0]) for row in rows)
    return sorted(found, key=lambda name: name.startswith("Trained"))


def group(name: str) -> str:
    """Return the name of a row; nets that differ in their activations share it."""
    return name.partition(",")[0] if name.startswith(f"{UNTRAINED} 6") else name


def net_cells(name: str, rows: Sequence[Row]) -> list[str]:
    """Return the row of a net; cells of what was not measured are empty."""
    if name.startswith(UNTRAINED):
        of_mean, deviations = f"diagonal: {BIAS}", [f"diagonal: {RATIO}", f"full: {RATIO}"]
        cells = [cell([float(v) for *_, q, v in rows if q == of_mean])]
        cells += [deviation([float(v) for *_, q, v in rows if q == own]) for own in deviations]
    else:
        cells = [cell(of_way(rows, PASS, BIAS))]
        cells += [deviation(of_way(rows, way, RATIO)) for way in (PASS, FULL)]
        cells += [cell(of_way(rows, way, CLASSES)) for way in (PASS, DRAWS)]
    return [name.removeprefix("Untrained nets: "), *cells]


def of_way(rows: Sequence[Row], way: str, quantity: str) -> list[float]:
    """Return the values of a quantity that are predicted in one way, of all guides and seeds."""
    return [float(v) for _, row, _, q, v in rows if q == quantity and row.endswith(f": {way}")]


def cell(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" if values else ""


def deviation(ratios: Sequence[float]) -> str:
    """Return the mean and, in parentheses, the largest error of ratios, in percent."""
    errors = [abs(value - 1) for value in ratios]
    return f"{percent(fmean(errors))} ({percent(max(errors))})" if errors else ""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
