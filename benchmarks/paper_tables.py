"""A paper's tables beside what is measured here, from two files of the same columns.

``results.csv`` has a line for each number measured; ``published.csv`` beside it, with "paper" in place
of a seed, one for each that is printed in the paper. A cell is the mean over seeds with its standard
error, and the paper's number in parentheses.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.markdown import markdown
from benchmarks.rows import Row, mean_with_error, read_rows

HEADER = ("table", "row", "seed", "quantity", "value")
PUBLISHED = "published.csv"


def paper_tables(path: Path) -> str:
    """Return every table of a paper: a title, its rows in their order, a column for each quantity."""
    ours = read_rows(path, HEADER)
    printed = path.with_name(PUBLISHED)
    theirs = read_rows(printed, HEADER) if printed.exists() else []
    tables = dict.fromkeys(row[0] for row in ours)
    return "\n\n".join(
        table_of(title, *([row[1:] for row in rows if row[0] == title] for rows in (ours, theirs)))
        for title in tables
    )


def table_of(title: str, ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """Return one table of rows ``(row, seed, quantity, value)``."""
    both = [*ours, *theirs]
    names, quantities = (list(dict.fromkeys(row[i] for row in both)) for i in (0, 2))
    body = [
        [name, *(cell(ours, theirs, name, quantity) for quantity in quantities)] for name in names
    ]
    counts = sorted({len(seeds_of(ours, name)) for name in names} - {0})
    seeds = " to ".join(dict.fromkeys(map(str, (counts[0], counts[-1]))))
    corner = "ours (paper)" if theirs else ""
    plural = "" if counts[-1] == 1 else "s"
    return f"### {title}\n\n{markdown([corner, *quantities], body)}\n\n{seeds} seed{plural}."


def seeds_of(rows: Sequence[Row], name: str) -> set[str]:
    return {row[1] for row in rows if row[0] == name}


def cell(ours: Sequence[Row], theirs: Sequence[Row], name: str, quantity: str) -> str:
    """Return what was measured, and in parentheses what is published; either may be missing."""
    measured, published = (
        [float(value) for row, _, asked, value in rows if (row, asked) == (name, quantity)]
        for rows in (ours, theirs)
    )
    parts = [mean_with_error(measured, digits)]
    parts += [f"({digits(value)})" for value in published]
    return " ".join(part for part in parts if part)


def digits(value: float) -> str:
    """Return three significant digits, and whole numbers above a thousand."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
