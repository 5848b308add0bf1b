"""Figures of committed results: costs of steps and predictions, ELBOs, and active learning.

python -m benchmarks.figures --costs docs/evidence/costs.svg
python -m benchmarks.figures --convergence docs/evidence/convergence.svg
python -m benchmarks.figures --active docs/gallery/active_learning.svg
"""

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.active_table import ACTIVE, curve
from benchmarks.figure_sources import digest, metadata
from benchmarks.rows import Row, read_rows
from benchmarks.tables import DEFAULT, VARIANTS, net_of
from pyro_structvi.plots.figures import BLUE, GREY, ORANGE, SKY, VERMILION

STYLE: Any = {"svg.fonttype": "none", "font.size": 9}
RESULTS = Path(__file__).parent / "results"
NETS = {"small": SKY, "mnist": BLUE, "wide": ORANGE, "resnet18": VERMILION}
# The guides of the figure of costs; another name of the same guide is that of a net where it differs.
GUIDES = {
    "MAP": (),
    "ensemble of 5": ("ensemble of 5, in turn",),
    "MC dropout": (),
    "mean field": (),
    "k-tied, k = 2": (),
    "rank-1": (),
    "Walsh-Hadamard": (),
    "inducing 64": (),
    "low rank, K = 2": (),
    "matrix normal": (),
    "rowwise": (),
    "global inducing": (),
    "full covariance": (),
}
SHADES = ("#c6dbef", "#6baed6", "#08519c")  # of the numbers of steps
SMALLEST = 0.01  # nats for each example; what is less is at the left end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, help="an image file for times of steps")
    parser.add_argument("--convergence", type=Path, help="an image file for ELBOs against steps")
    parser.add_argument("--active", type=Path, help="an image file for errors against labels")
    options = parser.parse_args()
    if options.active:
        draw_active(read_rows(RESULTS / "active_learning.csv", ACTIVE), options.active)
    if options.costs:
        draw_costs(read("bench"), options.costs)
        print(f"Drawn: {', '.join(GUIDES)}.")
    if options.convergence:
        draw_convergence(read("convergence"), options.convergence)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def save(figure: Figure, path: Path, results: Any) -> None:
    figure.savefig(path, metadata=metadata(path, digest(results)))


# ---- active learning -----------------------------------------------------------------------------


def draw_active(rows: list[Row], path: Path) -> None:
    """Draw errors against labels, a panel for each set; dashed where labels are random."""
    sets = list(dict.fromkeys(row[0] for row in rows))
    methods = list(dict.fromkeys(row[1] for row in rows))
    with rc_context({"svg.hashsalt": "active"} | STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
            for method, color in zip(methods, (BLUE, VERMILION, GREY, SKY), strict=False):
                for choice, line in (("variance", "-"), ("random", ":")):
                    errors = curve(rows, name, method, choice)
                    label = f"{method}, {choice}"
                    axes.plot([*errors], [*errors.values()], line, color=color, label=label)
            axes.set(title=name, xlabel="labels", yscale="log")
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("root mean squared error")
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=len(methods))
        save(figure, path, rows)


# ---- costs ---------------------------------------------------------------------------------------


def draw_costs(results: dict[str, Any], path: Path) -> None:
    """Draw bars of the median ratios of steps and predictions; traced steps are diamonds."""
    with rc_context({"svg.hashsalt": "costs"} | STYLE):
        figure = Figure(figsize=(7.2, 7.2), layout="constrained")
        step, prediction = figure.subplots(1, 2, sharex=True, sharey=True)
        for index, (name, color) in enumerate(NETS.items()):
            net = results["nets"][name]
            bars(step, net, "step", index, color)
            bars(prediction, net, "prediction", index, color)
        step.plot([], [], "D", color="black", markersize=3.5, linestyle="none", label="traced step")
        step.set(yticks=range(len(GUIDES)), yticklabels=GUIDES, xscale="log", xlim=(0.2, 200))
        step.set_ylim(len(GUIDES) - 0.4, -0.6)
        step.set_xlabel("training step / the net's own")
        prediction.set_xlabel("prediction / the net's own")
        ticks = (0.3, 1, 3, 10, 30, 100)
        for axes in (step, prediction):
            axes.axvline(1, color=GREY, linewidth=0.8, zorder=0)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*step.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        save(figure, path, results)


def bars(axes: Axes, net: dict[str, Any], task: str, index: int, color: str) -> None:
    """Draw the bars of one net, from 1 to each ratio."""
    height = 0.84 / len(NETS)
    for place, (guide, others) in enumerate(GUIDES.items()):
        y = place + (index - (len(NETS) - 1) / 2) * height
        ratios = [
            net["methods"][title][task]["ratio"][1]
            for title in (guide, *others)
            if task in net["methods"].get(title, {})
        ]
        if ratios:
            axes.barh(y, ratios[0] - 1, 0.9 * height, left=1, color=color)
        traced = net["methods"].get(f"{guide}{VARIANTS[0]}")
        if task == "step" and traced:
            axes.plot(traced[task]["ratio"][1], y, "D", color="black", markersize=2.5)
    axes.barh(math.nan, 1, color=color, label=net["title"])


# ---- convergence ---------------------------------------------------------------------------------


def draw_convergence(results: dict[str, Any], path: Path) -> None:
    """Draw how far ELBOs of the default recipe are below the best, a panel for each problem."""
    problems = [own for own in results["convergence"].values() if DEFAULT in own["recipes"]]
    guides = list(dict.fromkeys(guide for own in problems for guide in own["recipes"][DEFAULT]))
    columns = 3
    with rc_context({"svg.hashsalt": "convergence"} | STYLE):
        figure = Figure(figsize=(7.2, 6.4), layout="constrained")
        panels = figure.subplots(
            *(-(-len(problems) // columns), columns), sharex=True, sharey=True, squeeze=False
        )
        for axes, problem in zip(panels.flat, problems, strict=False):
            draw_problem(axes, problem, guides, results["steps"])
        for axes in list(panels.flat)[len(problems) :]:
            axes.remove()
        for axes in panels[-1]:
            axes.set_xlabel("nats below the best,\nfor each example")
        axes = panels.flat[0]
        axes.set(yticks=range(len(guides)), yticklabels=guides, xscale="log")
        axes.set_ylim(len(guides) - 0.5, -0.5)
        axes.set_xticks((0.01, 0.1, 1, 10), ("0.01", "0.1", "1", "10"))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
        save(figure, path, results)


def draw_problem(axes: Axes, problem: dict[str, Any], guides: list[str], steps: list[int]) -> None:
    """Draw a row of markers for each guide, the darker the more steps."""
    rows = problem["recipes"][DEFAULT]
    best = max(value for row in rows.values() for value in row["elbo"])
    count = examples_of(problem)
    for index, (number, color) in enumerate(zip(steps, SHADES, strict=True)):
        known = [guide for guide in guides if len(rows.get(guide, {}).get("elbo", ())) > index]
        gaps = [max((best - rows[guide]["elbo"][index]) / count, SMALLEST) for guide in known]
        places = [guides.index(guide) for guide in known]
        axes.plot(gaps, places, "o", color=color, markersize=5, label=f"{number:,} steps")
    axes.set_title(net_of(problem), fontsize=9)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)


def examples_of(problem: dict[str, Any]) -> int:
    """Return how many examples a problem has, from its title."""
    found = re.search(r"(\d+) examples", problem["title"])
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    main()
