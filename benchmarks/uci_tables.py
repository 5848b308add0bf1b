"""Tables of the UCI regressions, with published numbers beside ours."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from benchmarks.markdown import markdown
from benchmarks.rows import Row

HEADER = ("data", "split", "noise", "guide", "log likelihood", "RMSE", "seconds")
SAMPLED = (
    *("data", "split", "sampled", "log likelihood", "RMSE"),
    *("standardized log likelihood", "standardized RMSE", "R-hat", "seconds"),
)
ESTIMATORS = ("data", "split", "method", "log likelihood", "RMSE", "seconds")
CLASSIFIERS = ("data", "fold", "method", "log likelihood", "error (%)", "seconds")
DECOMPOSED = ("data", "split", "posterior", "RMSE", "NLL", "seconds")
LOG_LIKELIHOOD, ERROR = (HEADER.index(name) for name in ("log likelihood", "RMSE"))
SETS = ("boston", "concrete", "energy", "kin8nm", "power", "protein")
HETEROSCEDASTIC = "heteroscedastic"
BASE = "mean field"
STRUCTURED = (
    *("k-tied, k = 2", "matrix normal", "rowwise", "low rank, full diagonal", "FFG-U"),
    "global inducing",
)
SAMPLED_VI = "sampled VI, heteroscedastic, learned prior (Wu et al. 2019, Table 2)"
DVI = "DVI (there)"

# Log likelihood and, where it is given, RMSE.
PUBLISHED = {
    "VI of Graves (Gal and Ghahramani 2016, Table 1)": (
        *((-2.90, 4.32), (-3.39, 7.19), (-2.39, 2.65), (0.90, 0.10), (-2.89, 4.33)),
        (-2.99, 4.84),
    ),
    "PBP (there)": (
        *((-2.57, 3.01), (-3.16, 5.67), (-2.04, 1.80), (0.90, 0.10), (-2.84, 4.12)),
        (-2.97, 4.73),
    ),
    "MC dropout, tuned": (
        *((-2.40, 2.90), (-2.93, 4.82), (-1.21, 0.54), (1.14, 0.08), (-2.80, 4.01)),
        (-2.87, 4.27),
    ),
    "deep ensemble of 5 (Lakshminarayanan 2017)": (
        *((-2.41, 3.28), (-3.06, 6.03), (-1.38, 2.09), (1.20, 0.09), (-2.79, 4.11)),
        (-2.83, 4.71),
    ),
    SAMPLED_VI: ((-2.46,), (-3.07,), (-1.03,), (1.14,), (-2.80,), (-2.87,)),
    DVI: ((-2.41,), (-3.06,), (-1.01,), (1.13,), (-2.80,), (-2.85,)),
}


def uci_tables(rows: Iterable[Row]) -> str:
    """Return the tables of random splits and of gap splits for each noise, in this order."""
    rows = list(rows)
    noises = dict.fromkeys(row[2] for row in rows)
    parts = []
    for is_gap, title in ((False, "Random splits"), (True, "Gap splits")):
        for noise in noises:
            own = [r for r in rows if r[2] == noise and r[1].startswith("gap") == is_gap]
            if own:
                parts.append(f"### {title}, {noise} noise")
                parts += gap_parts(own) if is_gap else random_parts(own, noise)
    return "\n\n".join(parts)


def likelihood_table(rows: Iterable[Row]) -> str:
    """Return published and measured log likelihoods with heteroscedastic noise, and what is reached.

    A guide without all splits of a set has no number there; gap splits are columns of their own.
    """
    rows = [row for row in rows if row[2] == HETEROSCEDASTIC]
    random, gaps = ([r for r in rows if r[1].startswith("gap") == is_gap] for is_gap in (0, 1))
    sets = [name for name in SETS if any(row[0] == name for row in random)]
    between = sorted({row[0] for row in gaps})
    body = [
        [title, *(f"{values[SETS.index(name)][0]:.2f}" for name in sets), *("" for _ in between)]
        for title, values in PUBLISHED.items()
    ]
    for guide in dict.fromkeys(row[3] for row in rows):
        cells = [*(whole(random, name, guide) for name in sets)]
        cells += [whole(gaps, name, guide) for name in between]
        body += [[guide, *cells]] if any(cells) else []
    head = ["log likelihood", *sets, *(f"gaps of {name}" for name in between)]
    numbers = [f"{name} {splits_of(random, name)}" for name in sets]
    numbers += [f"gaps of {name} {splits_of(gaps, name)}" for name in between]
    return (
        f"{markdown(head, body)}\n\nSplits: {', '.join(numbers)}. {what_is_reached(random, sets)}"
    )


def whole(rows: list[Row], name: str, guide: str) -> str:
    """Return the mean log likelihood of a guide that has all splits of a set."""
    values = list(values_of(rows, name, guide, LOG_LIKELIHOOD).values())
    return written(values, 2) if values and len(values) == splits_of(rows, name) else ""


def sampling_table(rows: Iterable[Row]) -> str:
    """Return means over splits of sampled posteriors and of their points.

    Args:
        rows: Rows of :data:`SAMPLED`.
    """
    rows, table = list(rows), []
    for data in dict.fromkeys(row[0] for row in rows):
        for name, kind in (("points", "points"), ("chains from points", "draws")):
            each = [row for row in rows if row[0] == data and row[2] == kind]
            columns = [[float(row[i]) for row in each] for i in (3, 4, 5, 6, 8)]
            if each:
                table.append([data, str(len(each)), name, *(within(column) for column in columns)])
    header = ["data", "splits", "posterior", "log likelihood", "RMSE"]
    return markdown([*header, "standardized", "its RMSE", "seconds"], table)


def estimators_table(rows: Iterable[Row], header: Row = ESTIMATORS) -> str:
    """Return both scores of estimators on each set, of the splits that all of them have.

    Seconds are the least and the largest of the sets' medians.

    Args:
        rows: Rows of :data:`ESTIMATORS`, or of :data:`CLASSIFIERS`.
        header: Names of their columns.
    """
    rows = list(rows)
    sets = list(dict.fromkeys(row[0] for row in rows))
    shared = {}
    for name in sets:
        splits = [
            {row[1] for row in rows if row[0] == name and row[2] == method}
            for method in dict.fromkeys(row[2] for row in rows if row[0] == name)
        ]
        shared[name] = set.intersection(*splits)
    body = []
    for method in dict.fromkeys(row[2] for row in rows):
        own = [row for row in rows if row[2] == method and row[1] in shared[row[0]]]
        cells = []
        for name in sets:
            columns = [[float(r[i]) for r in own if r[0] == name and r[i]] for i in (3, 4)]
            cells.append(
                "; ".join(within(c) if c else "-" for c in columns) if any(columns) else ""
            )
        medians = [
            median(float(row[5]) for row in own if row[0] == name)
            for name in dict.fromkeys(row[0] for row in own)
        ]
        ends = dict.fromkeys(f"{end(medians):.0f}" for end in (min, max))
        body.append([method, *cells, " to ".join(ends)])
    head = ["; ".join(header[3:5]), *(f"{name} ({len(shared[name])})" for name in sets)]
    return markdown([*head, "seconds"], body)


def within(values: Sequence[float]) -> str:
    """Return a mean with its standard error, or a single value."""
    mean = f"{fmean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values) / math.sqrt(len(values)):.2g}"


def random_parts(rows: list[Row], noise: str) -> list[str]:
    """Return the published rows and ours, what is reached, and differences on the same splits."""
    sets = [name for name in SETS if any(row[0] == name for row in rows)]
    published = [
        [title, *("; ".join(f"{v:.2f}" for v in values[SETS.index(name)]) for name in sets)]
        for title, values in PUBLISHED.items()
    ]
    table = markdown(["log likelihood; RMSE", *sets], published + own_rows(rows, sets))
    reached = [what_is_reached(rows, sets)] if noise == HETEROSCEDASTIC else []
    return [table, counts(rows, sets), *reached, *difference_parts(rows, sets)]


def gap_parts(rows: list[Row]) -> list[str]:
    sets = sorted({row[0] for row in rows})
    table = markdown(["log likelihood; RMSE", *sets], own_rows(rows, sets))
    return [table, counts(rows, sets), *difference_parts(rows, sets)]


def counts(rows: list[Row], sets: Sequence[str]) -> str:
    """Return the line that says how many splits a set has."""
    numbers = ", ".join(f"{name} {splits_of(rows, name)}" for name in sets)
    return f"Splits: {numbers}; parentheses mark guides with fewer splits."


def splits_of(rows: list[Row], name: str) -> int:
    return len({row[1] for row in rows if row[0] == name})


def values_of(rows: list[Row], name: str, guide: str, column: int) -> dict[str, float]:
    """Return the values of a set and a guide by split."""
    return {row[1]: float(row[column]) for row in rows if (row[0], row[3]) == (name, guide)}


# ---- means over splits ---------------------------------------------------------------------------


def own_rows(rows: list[Row], sets: list[str]) -> list[list[str]]:
    guides = dict.fromkeys(row[3] for row in rows)
    return [[guide, *(cell(rows, name, guide) for name in sets)] for guide in guides]


def cell(rows: list[Row], name: str, guide: str) -> str:
    """Return means over splits with standard errors, or nothing where there is none."""
    densities, errors = (
        list(values_of(rows, name, guide, column).values()) for column in (LOG_LIKELIHOOD, ERROR)
    )
    if not densities:
        return ""
    few = f" ({len(densities)})" if len(densities) < splits_of(rows, name) else ""
    return f"{written(densities, 2)}; {written(errors, decimals(fmean(errors)))}{few}"


def written(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return a mean and its standard error, where there are several values."""
    mean = f"{fmean(values):{sign}.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def decimals(value: float) -> int:
    """Return how many decimals give a value three significant digits."""
    return max(0, 2 - math.floor(math.log10(abs(value)))) if value else 2


# ---- differences on the same splits --------------------------------------------------------------


def difference_parts(rows: list[Row], sets: list[str]) -> list[str]:
    """Return the table of differences to mean field, of the splits that a guide shares with it."""
    guides = [guide for guide in dict.fromkeys(row[3] for row in rows) if guide != BASE]
    body = [[guide, *(difference(rows, name, guide) for name in sets)] for guide in guides]
    body = [line for line in body if any(line[1:])]
    head = [f"difference to {BASE}, paired by split", *sets]
    return [markdown(head, body)] if body else []


def difference(rows: list[Row], name: str, guide: str) -> str:
    """Return the mean of differences in log likelihood and RMSE, with their standard errors."""
    parts = []
    for column in (LOG_LIKELIHOOD, ERROR):
        own, base = (values_of(rows, name, each, column) for each in (guide, BASE))
        shared = [split for split in own if split in base]
        if not shared:
            return ""
        digits = 2 if column == LOG_LIKELIHOOD else decimals(fmean(base[s] for s in shared))
        parts.append(written([own[split] - base[split] for split in shared], digits, "+"))
    return "; ".join(parts)


# ---- beside published numbers --------------------------------------------------------------------


def what_is_reached(rows: list[Row], sets: list[str]) -> str:
    """Return a line of how many sets mean field and the best structured guide reach on."""
    near = [name for name in sets if is_near(rows, name)]
    best = {name: best_structured(rows, name) for name in sets}
    known = {name: found for name, found in best.items() if found}
    good = [name for name, (_, mean) in known.items() if round(mean, 2) >= published(DVI, name)]
    guides = dict.fromkeys(guide for guide, _ in known.values())
    chosen = "; ".join(
        f"{guide} on {', '.join(name for name in known if known[name][0] == guide)}"
        for guide in guides
    )
    return (
        f"{BASE.capitalize()} is within two standard errors of the log likelihood of sampled VI "
        f"(Wu et al.), or above it, on {len(near)} of {len(sets)} sets{but(sets, near)}. The best "
        f"structured guide with all splits, chosen by these results ({chosen or 'none'}), reaches "
        f"the mean log likelihood of DVI, to two decimals, on {len(good)} of {len(known)} "
        f"sets{but(list(known), good)}."
    )


def but(sets: Sequence[str], found: Sequence[str]) -> str:
    missing = [name for name in sets if name not in found]
    return f" (not on {', '.join(missing)})" if missing else ""


def is_near(rows: list[Row], name: str) -> bool:
    """Whether mean field is at least the published value less two standard errors."""
    values = list(values_of(rows, name, BASE, LOG_LIKELIHOOD).values())
    margin = 2 * standard_error(values) if len(values) > 1 else 0.0
    return bool(values) and fmean(values) + margin >= published(SAMPLED_VI, name)


def best_structured(rows: list[Row], name: str) -> tuple[str, float] | None:
    """Return the structured guide with the highest mean over all splits of a set, and this mean."""
    found = []
    for guide in STRUCTURED:
        values = values_of(rows, name, guide, LOG_LIKELIHOOD)
        if values and len(values) == splits_of(rows, name):
            found.append((fmean(values.values()), guide))
    if not found:
        return None
    mean, guide = max(found)
    return guide, mean


def published(title: str, name: str) -> float:
    return PUBLISHED[title][SETS.index(name)][0]
