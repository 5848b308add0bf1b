"""Tables of the UCI regressions, with published numbers beside ours."""

from collections import defaultdict
from collections.abc import Iterable

from benchmarks.markdown import markdown
from benchmarks.rows import Row, mean_with_error

HEADER = ("data", "split", "noise", "guide", "log likelihood", "RMSE", "seconds")
SETS = ("boston", "concrete", "energy", "kin8nm", "power", "protein")

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
    "sampled VI, heteroscedastic, learned prior (Wu et al. 2019, Table 2)": (
        *((-2.46,), (-3.07,), (-1.03,), (1.14,), (-2.80,), (-2.87,)),
    ),
    "DVI (there)": ((-2.41,), (-3.06,), (-1.01,), (1.13,), (-2.80,), (-2.85,)),
}


def uci_tables(rows: Iterable[Row]) -> str:
    """Return a table of random splits for each noise, published numbers first, and one of gaps."""
    random: dict[str, list[Row]] = defaultdict(list)
    gaps: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        (gaps if row[1].startswith("gap") else random)[row[2]].append(row)
    parts = []
    for noise, own in random.items():
        sets = [name for name in SETS if any(row[0] == name for row in own)]
        published = [
            [title, *("; ".join(f"{v:.2f}" for v in values[SETS.index(name)]) for name in sets)]
            for title, values in PUBLISHED.items()
        ]
        counts = ", ".join(f"{name} {splits_of(own, name)}" for name in sets)
        head = ["log likelihood; RMSE", *sets]
        body = markdown(head, published + own_rows(own, sets))
        parts.append(f"### Random splits, {noise} noise\n\n{body}\n\nSplits: {counts}.")
    for noise, own in gaps.items():
        sets = sorted({row[0] for row in own})
        body = markdown(["log likelihood; RMSE", *sets], own_rows(own, sets))
        parts.append(f"### Gap splits, {noise} noise\n\n{body}")
    return "\n\n".join(parts)


def splits_of(rows: list[Row], name: str) -> int:
    return len({row[1] for row in rows if row[0] == name})


def own_rows(rows: list[Row], sets: list[str]) -> list[list[str]]:
    guides = dict.fromkeys(row[3] for row in rows)
    return [[guide, *(cell(rows, name, guide) for name in sets)] for guide in guides]


def cell(rows: list[Row], name: str, guide: str) -> str:
    """Return means over splits with standard errors, or nothing where there is none."""
    own = [row for row in rows if row[0] == name and row[3] == guide]
    parts = (mean_with_error([float(row[i]) for row in own], "{:.2f}".format) for i in (4, 5))
    return "; ".join(parts) if own else ""
