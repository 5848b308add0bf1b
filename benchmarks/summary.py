"""The league in one number for each guide: the table of the front page, and the figure of the choice.

    python -m benchmarks.summary

A guide's distance to NUTS is divided by that of mean field on the same problem, and so is the time of
its steps; of the problems the geometric mean is taken. The cost of a step of larger nets is that of
``benchmarks/results/bench.json``.
"""

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import NamedTuple

from benchmarks.league_tables import HEADER, Cells, by_problem, headline
from benchmarks.markdown import markdown
from benchmarks.rows import Row, read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "choosing_a_guide.md"]
GENERATED = re.compile(
    r"(?P<begin><!-- summary of the league -->\n).*?(?P<end><!-- end of summary -->)", re.DOTALL
)
MEASURE = "mean field"


class Choice(NamedTuple):
    """A guide that the tables name.

    Attributes:
        code: How to make it.
        page: Its page, from ``docs/``.
        captures: What of the posterior it can tell.
        league: Its name in the league.
        bench: Its name among the benchmarks.
    """

    code: str
    page: str
    captures: str
    league: str
    bench: str


CHOICES = [
    Choice(
        "GlobalInducingGuide",
        "guides/global_inducing.md",
        "correlations of all layers",
        "global inducing",
        "global inducing",
    ),
    Choice(
        "MatrixNormalGuide(join_bias=True)",
        "guides/matrix_normal.md",
        "correlations of rows, and of columns",
        "matrix normal, joined",
        "matrix normal",
    ),
    Choice(
        "RowwiseGuide(join_bias=True)",
        "guides/rowwise.md",
        "all correlations within a unit",
        "rowwise, joined",
        "rowwise",
    ),
    Choice(
        "InducingWeightGuide",
        "guides/inducing_weights.md",
        "correlations within a layer, in few numbers",
        "FFG-U, 64 x 64",
        "inducing 64",
    ),
    Choice(
        "FullCovarianceGuide",
        "guides/full_covariance.md",
        "all correlations within a layer",
        "full covariance",
        "full covariance",
    ),
    Choice(
        'AutoLowRankLRT(rank=5, diagonal="full", join_bias=True)',
        "guides/low_rank.md",
        "directions of correlation in a layer",
        "low rank, full diagonal",
        "low rank, K = 5",
    ),
    Choice(
        "KTiedGuide(rank=2)",
        "guides/k_tied.md",
        "no correlation, with half of the numbers",
        "k-tied, k = 2",
        "k-tied, k = 2",
    ),
    Choice(
        "MeanFieldGuide",
        "guides/mean_field.md",
        "no correlation",
        "mean field",
        "mean field",
    ),
]


class Summary(NamedTuple):
    """A posterior's distance to NUTS and the time of a step, those of mean field being 1.

    Attributes:
        distance: The geometric mean over problems.
        error: Its standard error, over runs of the training.
        cost: The geometric mean of times.
        by_problem: The distance on each problem.
    """

    distance: float
    error: float
    cost: float
    by_problem: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT, help="a folder")
    options = parser.parse_args()
    rows = read_rows(RESULTS / "league.csv", HEADER)
    for page in PAGES:
        path = options.output / page.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page.read_text(), page))
    draw_figure(rows, options.output / "docs" / "choosing.svg")
    print(table(rows, "docs/"))


def render(text: str, page: Path) -> str:
    """Put the table in the place that a page has for it."""
    folder = "docs/" if page.parent == ROOT else ""
    made = table(read_rows(RESULTS / "league.csv", HEADER), folder)
    return GENERATED.sub(lambda found: f"{found['begin']}\n{made}\n\n{found['end']}", text)


# ---- numbers -------------------------------------------------------------------------------------


def summarize(rows: Iterable[Row]) -> dict[str, Summary]:
    """Return the summary of each method that was measured on every problem."""
    problems = by_problem(rows)
    names = [
        name
        for name in next(iter(problems.values()))
        if all(headline(cells) in cells.get(name, {}) for cells in problems.values())
    ]
    return {name: summary(name, problems) for name in names}


def summary(name: str, problems: Mapping[str, Cells]) -> Summary:
    ratios = {
        title: ratio_to_measure(cells, name, headline(cells)) for title, cells in problems.items()
    }
    values = {title: value for title, (value, _) in ratios.items()}
    middle = geometric_mean(values.values())
    error = middle * math.hypot(*(error for _, error in ratios.values())) / len(ratios)
    times = [
        ratio_to_measure(cells, name, "seconds")[0]
        for cells in problems.values()
        if sum(cells[name].get("seconds", [])) > 0
    ]
    return Summary(middle, error, geometric_mean(times) if times else math.nan, values)


def ratio_to_measure(cells: Cells, name: str, quantity: str) -> tuple[float, float]:
    """Return a quantity as a share of that of mean field, and the relative standard error."""
    own, measure = cells[name][quantity], cells[MEASURE][quantity]
    error = 0.0 if name == MEASURE else math.hypot(relative_error(own), relative_error(measure))
    return fmean(own) / fmean(measure), error


def relative_error(values: list[float]) -> float:
    """Return the standard error of a mean over the mean; zero of a single value."""
    if len(values) < 2:
        return 0.0
    return stdev(values) / math.sqrt(len(values)) / fmean(values)


def step_ratio(net: str, name: str) -> float | None:
    """Return the cost of a step of a net in units of the net's own, where it was measured."""
    methods = json.loads((RESULTS / "bench.json").read_text())["nets"][net]["methods"]
    return float(methods[name]["step"]["ratio"][1]) if name in methods else None


# ---- table and figure ----------------------------------------------------------------------------


def table(rows: Iterable[Row], folder: str) -> str:
    """Return the table of guides, the closest to NUTS first."""
    found = summarize(rows)
    choices = sorted(CHOICES, key=lambda choice: found[choice.league].distance)
    head = ["guide", "what it captures", "small net", "wide net", "distance to NUTS"]
    body = [
        [
            f"[`{short(choice)}`]({folder}{choice.page})",
            choice.captures,
            *(show_ratio(step_ratio(net, choice.bench)) for net in ("small", "wide")),
            show_distance(found[choice.league]),
        ]
        for choice in choices
    ]
    return markdown(head, body)


def short(choice: Choice) -> str:
    """Return the name without options."""
    return choice.code.partition("(")[0]


def show_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def show_distance(own: Summary) -> str:
    space = "\N{NO-BREAK SPACE}"
    error = f"{space}±{space}{own.error:.2f}" if own.error else ""
    return f"{own.distance:.2f}{error}"


def draw_figure(rows: Iterable[Row], path: Path) -> None:
    """Draw distance over the time of a step; small points are the problems one by one."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from pyro_structvi.plots.label_places import place_labels

    shown = {choice.league: short(choice) for choice in CHOICES}
    shown |= {"MAP": "MAPGuide", "Ensemble-W": "EnsembleGuide", "MC dropout": "MCDropoutGuide"}
    found = [summarize(rows)[name] for name in shown]
    columns = ((own.cost, own.distance, own.error) for own in found)
    cost, distance, error = (np.array(values) for values in zip(*columns, strict=True))
    with rc_context({"svg.hashsalt": "choosing", "font.size": 9}):
        # Names are placed by the size of the axes, so nothing may change it afterwards.
        figure = Figure(figsize=(7.2, 4.4))
        axes = figure.subplots()
        figure.subplots_adjust(0.09, 0.12, 0.98, 0.97)
        axes.axhline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
        for own in found:
            each = list(own.by_problem.values())
            axes.plot([own.cost] * len(each), each, ".", color="#bbbbbb", markersize=4, zorder=0)
        axes.errorbar(cost, distance, error, fmt="o", color="#0072B2", markersize=6)
        for axis, ticks in ((axes.xaxis, (1, 1.5, 2, 3, 4)), (axes.yaxis, (0.2, 0.5, 1, 2, 5))):
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.set_xlim(0.8, 5)
        axes.set_xlabel("time of a step (mean field = 1)")
        axes.set_ylabel("distance to NUTS (mean field = 1)")
        axes.spines[["top", "right"]].set_visible(False)
        place_labels(axes, [*shown.values()], cost, distance, error)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
