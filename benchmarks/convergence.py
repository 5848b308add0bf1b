"""The ELBO against the number of steps, for every guide, by the defaults of ``fit`` and other recipes.

    make convergence                                        # every problem, guide and recipe
    make convergence BENCH="--problem cosine --guide rowwise --recipe default --steps 2000"
    make convergence BENCH="--data FILE.npz"                # a regression from a file, too

The ELBO is that of all examples, averaged over many particles after a fit of so many steps, one for each
number; beside it is its standard error over these particles. Then, for each recipe and pair of a
posterior and one that contains it, whether the larger one ends at least as high, within twice the
standard error of the difference. A file of data has ``x``, ``y`` and ``train_idx (splits, examples)``;
its first split is taken. Seconds are those of the steps alone. ``python -m benchmarks.figures``
draws the results.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import pyro_structvi as ps
from benchmarks.measure import describe_machine
from benchmarks.problems import PROBLEMS, Problem, from_file
from benchmarks.recipes import GUIDES, RECIPES, TOO_LARGE, Recipe
from benchmarks.tables import convergence_table, write_results

SHARES = (0.1, 0.3, 1.0)  # of the steps, for each of which there is a fit
BLOCK = 10  # particles that run in one pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=[*PROBLEMS, "none"], action="append")
    parser.add_argument("--data", type=Path, action="append", default=[], help="an .npz file")
    parser.add_argument("--guide", choices=GUIDES, action="append", help="default: every guide")
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: every recipe")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--particles", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1, help="runs, whose mean and error are given")
    parser.add_argument("--output", type=Path, help="a JSON file; results are added to those in it")
    options = parser.parse_args()
    makers = {name: PROBLEMS[name] for name in options.problem or PROBLEMS if name != "none"}
    makers |= {path.stem: lambda path=path: from_file(path) for path in options.data}
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "steps": [math.ceil(share * options.steps) for share in SHARES],
        "particles": options.particles,
        "convergence": {},
    }
    if options.output and options.output.exists():
        results["convergence"] = json.loads(options.output.read_text())["convergence"]
    for name, make in makers.items():
        torch.manual_seed(0)
        problem = make()
        known = {"title": problem.title, "evidence": problem.evidence, "recipes": {}}
        recipes = results["convergence"].setdefault(name, known)["recipes"]
        guides = [
            guide for guide in options.guide or GUIDES if guide not in TOO_LARGE.get(name, ())
        ]
        for guide, recipe in product(guides, options.recipe or RECIPES):
            if RECIPES[recipe].only in (None, guide):
                seeds = range(options.seeds)
                row = mean_of([
                    train(make, guide, RECIPES[recipe], results, seed) for seed in seeds
                ])
                recipes.setdefault(recipe, {})[guide] = row
                print(f"{name} | {recipe} | {guide} | {row}", flush=True)
                if options.output:
                    write_results(results, options.output)
    for recipe in options.recipe or RECIPES:
        print(f"{recipe}\n\n{convergence_table(results, recipe)}\n")


def train(
    make: Callable[[], Problem], guide_name: str, recipe: Recipe, results: dict[str, Any], seed: int
) -> Any:
    """Return the ELBOs, their standard errors and the seconds of a fit for each number of steps."""
    row: dict[str, list[float]] = {"elbo": [], "error": [], "seconds": []}
    try:
        for steps in results["steps"]:
            torch.manual_seed(0)  # of data and net
            problem = make()
            torch.manual_seed(seed)
            take = best_of_starts if recipe.starts > 1 else fitted
            guide, seconds = take(problem, guide_name, recipe, steps)
            elbo, error = bound(problem, guide, results["particles"])
            for key, value in (("elbo", elbo), ("error", error), ("seconds", seconds)):
                row[key].append(round(value, 2))
    except FloatingPointError as error:  # the row stays short, and the table says that it diverged
        print(error, flush=True)
    return row


def fitted(problem: Problem, guide_name: str, recipe: Recipe, steps: int) -> tuple[Any, float]:
    """Return a guide after so many steps, and the seconds that they took."""
    model, data = problem.model, (problem.x, problem.y)
    guide = GUIDES[recipe.widens or guide_name](model)
    recipe.prepare(guide)
    own = {"batch_size": problem.batch_size, "progress": False}
    begin = time.perf_counter()
    if recipe.widens is not None:
        ps.fit(model, guide, data, num_steps=steps // 2, **own)
        guide, steps = ps.warm_start.full_covariance_from(guide), steps - steps // 2
    ps.fit(model, guide, data, num_steps=steps, **own, **recipe.options(guide, steps))
    return guide, time.perf_counter() - begin


def best_of_starts(
    problem: Problem, guide_name: str, recipe: Recipe, steps: int
) -> tuple[Any, float]:
    """Return the member with the best bound after so many steps, and the seconds that they took."""
    data, begin, starts = (problem.x, problem.y), time.perf_counter(), None
    stages = [("mean field", RECIPES["default"])] if recipe.is_nested else []
    for name, own in [*stages, (guide_name, recipe)]:
        guide = ps.MixtureGuide(problem.model, GUIDES[name], recipe.starts, starts=starts)
        ps.fit(
            *(problem.model, guide, data),
            num_steps=steps,
            batch_size=problem.batch_size,
            progress=False,
            **own.options(guide, steps),
        )
        starts = guide
    ps.weigh_by_bound(problem.model, guide, *data)
    return guide.best, time.perf_counter() - begin


def mean_of(runs: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the means over runs; the standard error is that of particles and runs together."""
    if len(runs) == 1:
        return runs[0]
    whole = range(min(len(run["elbo"]) for run in runs))
    elbos = [[run["elbo"][i] for run in runs] for i in whole]
    within = [math.hypot(*(run["error"][i] for run in runs)) / len(runs) for i in whole]
    between = [stdev(each) / math.sqrt(len(runs)) for each in elbos]
    return {
        "elbo": [round(mean(each), 2) for each in elbos],
        "error": [round(math.hypot(*pair), 2) for pair in zip(within, between, strict=True)],
        "seconds": [round(mean(run["seconds"][i] for run in runs), 2) for i in whole],
        "runs": elbos,
    }


@torch.no_grad()
def bound(problem: Problem, guide: Any, particles: int) -> tuple[float, float]:
    """Return the ELBO, and its standard error over blocks of particles."""
    objective = ps.StructuredELBO(num_particles=BLOCK, vectorize_particles=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        blocks = torch.stack([
            torch.as_tensor(objective.terms(problem.model, guide, problem.x, problem.y).elbo)
            for _ in range(max(2, particles // BLOCK))
        ]).double()
    return float(blocks.mean()), float(blocks.std() / math.sqrt(len(blocks)))


if __name__ == "__main__":
    main()
