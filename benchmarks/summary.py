"""The league in a line for each guide: the table of the front page, and the figure of the choice.

    python -m benchmarks.summary

A guide's distance to NUTS is divided by that of mean field on the same net, and the geometric mean over
nets is taken; nets whose reference does not mix are left out, and the linear regression, whose posterior
is known in closed form, has a column of its own. The cost of a step is from
``benchmarks/results/costs.json``.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from typing import Any, NamedTuple

from benchmarks.choices import CHOICES, MEAN_FIELD, PICTURED, Choice
from benchmarks.figure_sources import digest, metadata
from benchmarks.league_tables import (
    CEILING,
    HEADER,
    PRIOR,
    SAMPLED,
    SPREAD,
    Cells,
    by_problem,
    headline,
    is_exact,
    last_region,
    mixes,
)
from benchmarks.markdown import markdown
from benchmarks.peers import PEERS
from benchmarks.recommendation import (
    Recommendation,
    recommendation_table,
    recommendations,
    recommended_for,
    step_costs,
)
from benchmarks.rows import Row, read_rows
from benchmarks.tables import three_digits

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = re.compile(
    r"(?P<begin><!-- summary: (?P<part>\w+)(?: of (?P<names>.+))? -->\n)"
    r".*?(?P<end><!-- end of summary -->)",
    re.DOTALL,
)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if "<!-- summary: " in page.read_text()
]
NETS = {
    "cosine": "1-D regression",
    "clusters": "three clusters",
    "moons": "two moons",
    "spirals": "two spirals",
    "digits": "digits",
}
MEASURE = MEAN_FIELD.code
BESIDE_PEERS = {"GlobalInducingGuide", "MatrixNormalGuide", "MeanFieldGuide", "EnsembleGuide"}


class Summary(NamedTuple):
    """How far a posterior is from NUTS; a distance is divided by that of mean field.

    Attributes:
        distance: The geometric mean over nets.
        error: Its standard error, over runs of the training; zero where a net has one run.
        cost: The geometric mean of times, that of mean field being 1.
        by_problem: The distance on each net.
        factor: By how much standard deviations of the function differ from those of NUTS.
        factor_error: Its standard error, likewise.
        exact: The distance on the problem whose posterior is known in closed form.
    """

    distance: float
    error: float
    cost: float
    by_problem: Mapping[str, float]
    factor: float
    factor_error: float
    exact: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT, help="a folder")
    options = parser.parse_args()
    rows = read_rows(RESULTS / "league.csv", HEADER)
    for page in PAGES:
        path = options.output / page.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page.read_text(), page))
    draw_figure(rows, options.output / "docs" / "start" / "choosing.svg")
    print(table(rows, "docs/"))


def render(text: str, page: Path) -> str:
    """Put tables and captions in the places that a page has for them."""
    rows = read_rows(RESULTS / "league.csv", HEADER)
    folder = "docs/" if page.parent == ROOT else "../"
    own = [choice for choice in CHOICES if page.match(choice.page)]
    parts: dict[str, Callable[..., str]] = {
        "guides": lambda: table(rows, folder),
        "recommendation": lambda: recommendation_table(recommended(rows), folder),
        "closest": lambda: closest(rows),
        "bands": lambda: deviations(rows),
        "peers": lambda: peers(rows),
        "steps": lambda names: steps(names.split("; ")),
        "page": lambda: of_page(rows, own),
    }

    def replace(found: re.Match[str]) -> str:
        given = [found["names"]] if found["names"] else []
        return f"{found['begin']}\n{parts[found['part']](*given)}\n\n{found['end']}"

    return GENERATED.sub(replace, text)


# ---- numbers -------------------------------------------------------------------------------------


def summarize(rows: Iterable[Row]) -> dict[str, Summary]:
    """Return the summary of each method that was measured on every problem that counts."""
    problems = by_problem(rows)
    nets = {title: cells for title, cells in problems.items() if mixes(cells)}
    exact = next(cells for cells in problems.values() if is_exact(cells))
    names = [
        name
        for name in next(iter(nets.values()))
        if all(headline(cells) in cells.get(name, {}) for cells in (*nets.values(), exact))
    ]
    return {name: summary(name, nets, exact) for name in names}


def summary(name: str, nets: Mapping[str, Cells], exact: Cells) -> Summary:
    ratios = {
        title: ratio_to_measure(cells, name, headline(cells)) for title, cells in nets.items()
    }
    values = {title: value for title, (value, _) in ratios.items()}
    middle = geometric_mean(values.values())
    times = [
        ratio_to_measure(cells, name, "seconds")[0]
        for cells in nets.values()
        if sum(cells[name].get("seconds", [])) > 0
    ]
    logs = [cells[name][f"{last_region(cells)}: {SPREAD}"] for cells in nets.values()]
    factor = math.exp(fmean(map(fmean, logs)))
    is_repeated = all(len(values) > 1 for values in logs)
    return Summary(
        distance=middle,
        error=is_repeated
        * (middle * math.hypot(*(error for _, error in ratios.values())) / len(ratios)),
        cost=geometric_mean(times) if times else math.nan,
        by_problem=values,
        factor=factor,
        factor_error=is_repeated * factor * math.hypot(*map(standard_error, logs)) / len(logs),
        exact=ratio_to_measure(exact, name, headline(exact))[0],
    )


def ratio_to_measure(cells: Cells, name: str, quantity: str) -> tuple[float, float]:
    """Return a quantity as a share of that of mean field, and the relative standard error."""
    own, measure = cells[name][quantity], cells[MEASURE][quantity]
    error = 0.0 if name == MEASURE else math.hypot(relative_error(own), relative_error(measure))
    return fmean(own) / fmean(measure), error


def relative_error(values: list[float]) -> float:
    """Return the standard error of a mean over the mean."""
    return standard_error(values) / fmean(values)


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean; zero of a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def steps(names: Sequence[str]) -> str:
    """Return a line for each name of the benchmarks: medians of steps over the net's own.

    Nets without a measurement are left out.
    """
    nets = json.loads((RESULTS / "bench.json").read_text())["nets"]
    measured = [nets[name] for name in ("small", "mnist", "wide")]
    lines = []
    for name in names:
        parts = [
            f"{ratio_of(net, name)}{traced_ratio(net, name)} for {sizes_of(net)}"
            for net in measured
            if name in net["methods"]
        ]
        lines.append(f"- {name}: {listed(parts)}")
    return "\n".join(lines)


def ratio_of(net: Mapping[str, Any], method: str) -> str:
    """Return the median time of a step over the net's own."""
    return three_digits(net["methods"][method]["step"]["ratio"][1])


def traced_ratio(net: Mapping[str, Any], name: str) -> str:
    """Return the ratio of a traced step in brackets, if it is measured."""
    traced = f"{name}, traced"
    return f" ({ratio_of(net, traced)} traced)" if traced in net["methods"] else ""


def sizes_of(net: Mapping[str, Any]) -> str:
    """Return the widths of a net, of its title."""
    return str(net["title"]).partition(",")[0].removeprefix("MLP ")


# ---- table and figure ----------------------------------------------------------------------------

HEAD = [
    *("guide", "captures", "small net", "wide net"),
    *("distance to NUTS", "least - largest", "deviations", "linear"),
]


def table(rows: Iterable[Row], folder: str) -> str:
    """Return the table of guides, the closest to NUTS first, between NUTS itself and the prior."""
    found = summarize(list(rows))
    costs = [step_costs(net) for net in ("small", "wide")]
    body = [
        [
            f"[`{choice.code}`]({folder}{choice.page})",
            choice.captures,
            *(f"{own[choice.code]:.1f}" if choice.code in own else TOO_LARGE for own in costs),
            *distance_cells(found[choice.code]),
        ]
        for choice in sorted(CHOICES, key=lambda choice: found[choice.code].distance)
    ]
    ends = {"NUTS, a second run": CEILING, "the prior": PRIOR}
    first, last = ([title, "", "", "", *distance_cells(found[ends[title]])] for title in ends)
    return markdown(HEAD, [first, *body, last])


TOO_LARGE = "too large"


def distance_cells(own: Summary) -> list[str]:
    """Return the distance with its error, the least and largest of a net, and the other measures."""
    least, largest = min(own.by_problem.values()), max(own.by_problem.values())
    return [
        with_error(own.distance, own.error),
        f"{least:.2f} - {largest:.2f}",
        with_error(own.factor, own.factor_error),
        f"{own.exact:.2f}",
    ]


def net_head() -> list[str]:
    return ["distance to NUTS", *NETS.values(), "mean", "deviations"]


def net_cells(title: str, own: Summary) -> list[str]:
    """Return the distance on each net, its mean, and the deviations."""
    return [
        title,
        *(f"{own.by_problem[net]:.2f}" for net in NETS),
        with_error(own.distance, own.error),
        with_error(own.factor, own.factor_error),
    ]


def peers(rows: Iterable[Row]) -> str:
    """Return the table of other packages beside some guides, the closest to NUTS first."""
    found = summarize(rows)
    titles = {choice.code: f"`{choice.code}`" for choice in CHOICES if choice.guide in BESIDE_PEERS}
    titles[SAMPLED] = f"`{SAMPLED}`"
    titles |= {name: name for name in PEERS if name in found}
    body = [
        [*net_cells(titles[name], found[name]), f"{found[name].exact:.2f}"]
        for name in sorted(titles, key=lambda name: found[name].distance)
    ]
    return markdown([*net_head(), "linear"], body)


def recommended(rows: Iterable[Row]) -> list[Recommendation]:
    """Return the recommendations, by the results of the league and others."""
    rows = list(rows)
    found = summarize(rows)
    distances = {name: own.distance for name, own in found.items()}
    by_net = {name: own.by_problem for name, own in found.items()}
    return recommendations(distances, by_net, seconds_of_sampling(by_problem(rows)))


def seconds_of_sampling(problems: Mapping[str, Cells]) -> dict[str, float]:
    """Return the median seconds of sampling over nets, by method."""
    nets = [cells for cells in problems.values() if mixes(cells)]
    return {
        name: median(fmean(cells[name]["seconds"]) for cells in nets) for name in (CEILING, SAMPLED)
    }


def of_page(rows: Iterable[Row], choices: Sequence[Choice]) -> str:
    """Return the distances of the guides of a page, and the nets that they are recommended for."""
    rows = list(rows)
    found = summarize(rows)
    lines = [f"- `{choice.code}`: {in_words(found[choice.code])}." for choice in choices]
    sentences = [recommended_for(choice, recommended(rows)) for choice in choices]
    return "\n\n".join(["\n".join(lines), *filter(None, sentences)])


def in_words(own: Summary) -> str:
    """Return the distance to NUTS, the least and the largest of a net, and the deviations."""
    (least, closest_net), *_, (largest, farthest) = sorted(
        (value, NETS[net]) for net, value in own.by_problem.items()
    )
    span = f", from {least:.2f} ({closest_net}) to {largest:.2f} ({farthest})"
    return (
        f"distance {with_error(own.distance, own.error)}{span if least < largest else ''}; "
        f"deviations {with_error(own.factor, own.factor_error)}"
    )


def closest(rows: Iterable[Row]) -> str:
    """Return a sentence that names the closest guide on each net."""
    rows = list(rows)
    found = summarize(rows)
    best = {
        net: min(CHOICES, key=lambda choice: found[choice.code].by_problem[net]).guide
        for net in NETS
    }
    winners = list(dict.fromkeys(best.values()))
    parts = [
        f"`{guide}` on {listed([f'the {NETS[net]}' for net in NETS if best[net] == guide])}"
        for guide in winners
    ]
    return f"The closest guide on each net: {'; '.join(parts)} ({count_runs(rows)})."


def count_runs(rows: Iterable[Row]) -> str:
    """Return how many runs of the training a distance is the mean of, in words."""
    problems = by_problem(rows)
    counts = {
        len(problems[net][choice.code][headline(problems[net])])
        for net in NETS
        for choice in CHOICES
    }
    least, most = min(counts), max(counts)
    span = f"{least} to {most}" if most > least else f"{most}"
    return f"{span} run{'s' if most > 1 else ''} of the training"


def deviations(rows: Iterable[Row]) -> str:
    """Return the ratios of standard deviations to NUTS between and outside of the clusters."""
    cells = by_problem(rows)["cosine"]
    regions = {"between": "between the clusters", "outside": "outside of both"}
    quantities = [f"{region}: ratio of standard deviations" for region in regions]
    ratios = [
        (f"`{each.guide}`", *(f"{fmean(cells[each.code][own]):.2f}" for own in quantities))
        for each in PICTURED
    ]
    return markdown(["guide", *regions.values()], ratios)


def listed(parts: Sequence[str]) -> str:
    """Return a list in words."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def with_error(value: float, error: float) -> str:
    space = "\N{NO-BREAK SPACE}"
    said = f"{space}±{space}{error:.2f}" if error else ""
    return f"{value:.2f}{said}"


def draw_figure(rows: Iterable[Row], path: Path) -> None:
    """Draw distance over the time of the training; small points are the problems one by one."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from benchmarks.label_places import place_labels

    rows = list(rows)
    shown = {choice.code: choice.guide for choice in CHOICES}
    summaries = summarize(rows)
    found = [summaries[name] for name in shown]
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
        for axis, ticks in ((axes.xaxis, (0.5, 1, 2, 5, 10)), (axes.yaxis, (0.2, 0.5, 1, 2, 5))):
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.set_xlim(0.5, 20)
        axes.set_xlabel("processor time of the training (mean field = 1)")
        axes.set_ylabel("distance to NUTS (mean field = 1)")
        axes.spines[["top", "right"]].set_visible(False)
        place_labels(axes, [*shown.values()], cost, distance, error)
        figure.savefig(path, metadata=metadata(path, digest(rows)))


if __name__ == "__main__":
    main()
