"""The figure of the front page: a regression under several posteriors, beside NUTS.

    python docs/scripts/bands.py

The regression, the reference and the training are those of the league's first problem. A guide takes
about a quarter of a minute, NUTS a minute or more. What a posterior predicts is kept in a folder and not
computed again, so that the figure can be drawn anew in a second.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

import pyro_structvi as ps
from benchmarks import league
from benchmarks.choices import PICTURED
from benchmarks.figure_sources import metadata, short_run
from benchmarks.league_problems import LeagueProblem, cosine_regression
from pyro_structvi.plots.figures import figure_of, make_panels

# By title, the league's name; None is NUTS.
PANELS: dict[str, str | None] = {"NUTS (the posterior)": None} | {
    choice.guide: choice.code for choice in PICTURED
}
WIDTHS = (1, 2)  # of the bands, in standard deviations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", type=Path, default=Path(__file__).parents[1] / "bands.svg")
    parser.add_argument("--folder", type=Path, default=Path("demo_output/bands"))
    parser.add_argument("--references", type=Path, default=Path("demo_output/league"))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--draws", type=int, default=1000, help="of each posterior")
    parser.add_argument("--warmup", type=int, default=500, help="of each of NUTS' four chains")
    options = parser.parse_args()
    torch.set_num_threads(1)
    matplotlib.rcParams |= {"svg.hashsalt": "bands", "font.size": 9}
    for folder in (options.folder, options.references):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)  # of data and net, as in the league
    problem = cosine_regression()
    grid = torch.linspace(-2, 2, 161).unsqueeze(-1)
    moments = {title: predict(name, problem, grid, options) for title, name in PANELS.items()}
    for title, (_, scale) in moments.items():
        between = scale[(grid > -0.7).flatten() & (grid < 0.5).flatten()].mean()
        print(f"{title}: standard deviation {between:.2f} on average between the clusters")
    draw(moments, problem, grid, options.figure)


def predict(
    name: str | None, problem: LeagueProblem, grid: Tensor, options: Any
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the function, kept under the name."""
    path = options.folder / f"{name or 'NUTS'}, {options.steps} steps, {options.draws} draws.pt"
    if not path.exists():
        if name is None:
            posterior, _ = league.reference_draws("cosine", problem, 0, options)
        else:
            posterior = fit(name, problem, options.steps)
        torch.manual_seed(0)
        functions = ps.predict(problem.model, posterior, grid, num_samples=options.draws).functions
        torch.save((functions.mean(0).flatten(), functions.std(0).flatten()), path)
    mean, scale = torch.load(path)
    return mean, scale


def fit(name: str, problem: LeagueProblem, steps: int) -> Any:
    torch.manual_seed(0)
    guide = league.METHODS[name](problem.model)
    ps.fit(problem.model, guide, (problem.x, problem.y), num_steps=steps, progress=False)
    return guide


def source_of_bands() -> str:
    """Return the ELBO of a short training of each guide."""
    elbos = []
    for choice in PICTURED:
        torch.manual_seed(0)
        problem = cosine_regression()
        elbos.append(short_run(problem.model, choice.make(problem.model), problem.x, problem.y))
    return "; ".join(elbos)


def draw(
    moments: dict[str, tuple[Tensor, Tensor]], problem: LeagueProblem, grid: Tensor, path: Path
) -> None:
    panels = make_panels(2, 4, 10.4, 4.4, sharex=True, sharey=True)
    x, blue, red = grid.flatten(), "#0072B2", "#D55E00"
    for panel, (title, (mean, scale)) in zip(panels, moments.items(), strict=True):
        for width in WIDTHS:
            panel.fill_between(
                x, mean - width * scale, mean + width * scale, color=blue, alpha=0.22, linewidth=0
            )
        panel.plot(x, mean, color=blue, label="mean, and 1 and 2 standard deviations")
        panel.plot(x, torch.cos(4 * x + 0.8), color="black", linewidth=0.8, label="truth")
        panel.scatter(problem.x, problem.y, s=5, color=red, zorder=3, linewidth=0, label="data")
        panel.set_title(title)
        panel.set_ylim(-3.5, 3.5)
        panel.spines[["top", "right"]].set_visible(False)
    figure = figure_of(panels[0])
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(path, metadata=metadata(path, source_of_bands()))


if __name__ == "__main__":
    main()
