"""Figure 2: posteriors of a small regression net, in the weights and in inducing weights, beside NUTS.

    python -m examples.papers.ritter2021.regression --seeds 3 --figure regression.png

Draws of NUTS are kept in a folder, and made where they are missing (a minute). What was measured is
added to the file of results, and is not measured again.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.league import distances, reference_draws
from benchmarks.league_problems import LeagueProblem, cosine_regression
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from pyro_structvi.posterior.prediction import Prediction

TABLE = "Figure 2: posteriors in weights and in inducing weights, beside NUTS"
AGAIN = "NUTS, another run"
MEMBERS = 5
RATIO = "ratio of standard deviations"
QUANTITIES = {
    "between": ("Wasserstein", "difference of means", RATIO),
    "outside": ("Wasserstein", RATIO),
    "on data": ("Wasserstein", RATIO),
}
OF_EVERY_SIZE = ("FFG-U", "Ensemble-U")

Make = Callable[[Any, tuple[int, int]], nn.Module]
METHODS: dict[str, Make] = {
    "FFG-W": lambda model, shape: ps.MeanFieldGuide(model),
    "FCG-W": lambda model, shape: ps.FullCovarianceGuide(model),
    "FFG-U": ps.InducingWeightGuide,
    "FCG-U": lambda model, shape: ps.InducingWeightGuide(model, shape, "full"),
    "Ensemble-W": lambda model, shape: ps.EnsembleGuide(model, size=MEMBERS),
    "Ensemble-U": lambda model, shape: ps.InducingWeightGuide(
        model, shape, "ensemble", ensemble_size=MEMBERS
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--method", choices=[AGAIN, *METHODS], action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--draws", type=int, default=1000, help="of each posterior")
    parser.add_argument("--warmup", type=int, default=500, help="of each of NUTS' four chains")
    parser.add_argument(
        "--size",
        type=int,
        nargs="+",
        default=[64, 16],
        help="M of inducing weights, the first that of FCG-U",
    )
    parser.add_argument("--references", type=Path, default=Path("demo_output/league"))
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    parser.add_argument("--figure", type=Path, help="where to draw the functions of seed 0")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.draws, options.warmup = 20, 1, 40, 20
    options.references.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    drawn: dict[str, Prediction] = {}
    for row, (name, shape) in rows(options.size).items():
        is_asked = options.method is None or name in options.method
        for seed in range((1 if row == AGAIN else options.seeds) * is_asked):
            wants_figure = seed == 0 and options.figure is not None
            if not results.has(TABLE, row, str(seed)) or wants_figure:
                found, prediction = measure(name, shape, seed, options)
                if not results.has(TABLE, row, str(seed)):
                    lines = ((TABLE, row, str(seed), key, f"{v:.6g}") for key, v in found.items())
                    results.add(*lines)
                if wants_figure:
                    drawn[row] = prediction
    if options.figure:
        draw(drawn, options)


def rows(sizes: list[int]) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the method and the inducing shape of each row, by its name; NUTS first."""
    found = {AGAIN: (AGAIN, (1, 1))}
    for name in METHODS:
        for size in sizes if name in OF_EVERY_SIZE else sizes[:1]:
            found[f"{name}, M = {size}" if name.endswith("U") else name] = name, (size, size)
    return found


def measure(
    name: str, shape: tuple[int, int], seed: int, options: Any
) -> tuple[dict[str, float], Prediction]:
    """Return distances to NUTS and the rest of a row, and the prediction on the figure's grid."""
    torch.manual_seed(0)  # of data and net
    problem = cosine_regression()
    reference, _ = reference_draws("cosine", problem, 0, options)
    torch.manual_seed(seed)
    posterior: Any
    if name == AGAIN:
        posterior, found = reference_draws("cosine", problem, 1, options)[0], {}
    else:
        posterior = METHODS[name](problem.model, shape)
        found = train(problem, posterior, not name.startswith("Ensemble"), options)
    torch.manual_seed(seed)
    for region in QUANTITIES:
        ours, theirs = (
            ps.predict(problem.model, draws, problem.regions[region], num_samples=options.draws)
            for draws in (posterior, reference)
        )
        own = distances(problem.compares, ours, theirs)
        found |= {f"{region}: {key}": own[key] for key in QUANTITIES[region]}
    return found, ps.predict(problem.model, posterior, grid(), num_samples=options.draws)


def train(
    problem: LeagueProblem, guide: nn.Module, has_bound: bool, options: Any
) -> dict[str, float]:
    """Fit a guide by the defaults; return its ELBO where points do not spoil it, size and cost."""
    start = time.process_time()
    ps.fit(problem.model, guide, (problem.x, problem.y), num_steps=options.steps, progress=False)
    seconds = time.process_time() - start
    found = {"ELBO": elbo(problem, guide, 20 if options.smoke else 500)} if has_bound else {}
    parameters = sum(value.numel() for value in guide.parameters())
    return found | {"parameters": parameters, "CPU seconds": seconds}


@torch.no_grad()
def elbo(problem: LeagueProblem, guide: nn.Module, particles: int) -> float:
    objective = ps.StructuredELBO(num_particles=particles)
    return float(objective.terms(problem.model, guide, problem.x, problem.y).elbo)


def grid() -> Tensor:
    return torch.linspace(-2, 2, 201).unsqueeze(-1)


def draw(predictions: dict[str, Prediction], options: Any) -> None:
    """Draw the paper's figure: a panel for each posterior."""
    from pyro_structvi.plots import plot_band
    from pyro_structvi.plots.figures import figure_of, make_panels

    torch.manual_seed(0)
    problem = cosine_regression()
    reference, _ = reference_draws("cosine", problem, 0, options)
    panels = {"NUTS": ps.predict(problem.model, reference, grid(), num_samples=options.draws)}
    panels |= {row: each for row, each in predictions.items() if row != AGAIN}
    truth = torch.cos(4 * grid() + 0.8)
    given = {"data_x": problem.x, "data_y": problem.y, "truth": truth, "label": None}
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    axes = make_panels(rows, columns, 3.2 * columns, 2.6 * rows, sharex=True, sharey=True)
    for ax, (title, own) in zip(axes, panels.items(), strict=False):
        plot_band(grid(), own.mean, own.variance.sqrt(), ax, **given)
        ax.set(title=title, ylim=(-3, 3))
    figure_of(axes[0]).savefig(options.figure, dpi=100)


if __name__ == "__main__":
    main()
