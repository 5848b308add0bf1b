"""Bayesian optimization by posteriors over nets, by a Gaussian process, and by random search.

    python -m benchmarks.bayesian_optimization --trials 5 --output FILE.csv
    python -m benchmarks.bayesian_optimization --problem Branin --method "Gaussian process"
    python -m benchmarks.bayesian_optimization --problem Branin --quick          # to see that it runs

All methods but "random" maximize ``qLogExpectedImprovement`` of BoTorch over batches of inputs, from the
same random start in each trial. Nets have one hidden layer of 50 tanh units, the prior ``FanIn(2.0)``,
and learned noise; the guides are those of ``GUIDES``. The Gaussian process is ``SingleTaskGP``. What the
file of results has is not measured again; give ``--quick`` a file of its own.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.optimization_table import OPTIMIZATION, optimization_table
from benchmarks.rows import ResultsFile
from pyro_structvi.botorch import StructuredModel


class Problem(NamedTuple):
    """A function to be maximized, the number of random inputs, and rounds of batches of inputs."""

    function: Any
    start: int
    rounds: int
    batch: int


PROBLEMS = {
    "Branin": Problem(Branin(negate=True), 6, 8, 3),
    "Hartmann 6": Problem(Hartmann(6, negate=True), 20, 10, 4),
    "Ackley 10": Problem(Ackley(10, negate=True), 30, 10, 6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="default: all")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two rounds and a few steps")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")  # of optimizers that stop early
    results = ResultsFile(options.output, OPTIMIZATION)
    choices = options.problem or PROBLEMS, options.method or METHODS
    for trial, problem, method in product(range(options.trials), *choices):
        if not results.has(problem, method, str(trial)):
            best, seconds = optimize(PROBLEMS[problem], method, trial, options.quick)
            results.add((problem, method, str(trial), f"{best:.5g}", f"{seconds:.2f}"))
    print(optimization_table(results.rows))


def optimize(problem: Problem, method: str, trial: int, is_quick: bool) -> tuple[float, float]:
    """Return the regret of the best value that was found, and the seconds of a fit."""
    function, rounds = problem.function, 2 if is_quick else problem.rounds
    low, high = function.bounds
    torch.manual_seed(trial)
    x = torch.rand(problem.start, function.dim)
    y = function(low + (high - low) * x).unsqueeze(-1)
    seconds = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        model = METHODS[method](x, y, is_quick)
        seconds += time.perf_counter() - start
        new = suggest(model, x, y, problem.batch)
        x = torch.cat([x, new])
        y = torch.cat([y, function(low + (high - low) * new).unsqueeze(-1)])
    return float(function.optimal_value - y.max()), seconds / rounds


def suggest(model: Any, x: Tensor, y: Tensor, batch: int) -> Tensor:
    """Return the inputs of a batch."""
    if model is None:
        return torch.rand(batch, x.shape[1])
    bounds = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])])
    improvement = qLogExpectedImprovement(model, best_f=y.max())
    candidates, _ = optimize_acqf(
        improvement, bounds, batch, num_restarts=4, raw_samples=128, options={"maxiter": 50}
    )
    return candidates


# ---- methods -------------------------------------------------------------------------------------


def gaussian_process(x: Tensor, y: Tensor, is_quick: bool) -> SingleTaskGP:
    process = SingleTaskGP(x, y, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
    return process


def by_guide(make_guide: Callable[..., Any], **options: Any) -> Callable[..., StructuredModel]:
    """Return the method of a guide, with arguments of ``fit``."""

    def method(x: Tensor, y: Tensor, is_quick: bool) -> StructuredModel:
        net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
        net = ps.bayesianize(net, prior=ps.FanIn(2.0))
        model = ps.Regressor(net, noise="learned", standardize=(x, y))
        guide = make_guide(model)
        steps = 20 if is_quick else 600
        ps.fit(model, guide, (x, y), num_steps=steps, progress=False, compiled="traced", **options)
        return StructuredModel(model, guide, (x, y))

    return method


GUIDES = {
    "global inducing": by_guide(ps.GlobalInducingGuide),
    "matrix normal": by_guide(ps.MatrixNormalGuide),
    "mean field": by_guide(ps.MeanFieldGuide),
    "ensemble of 5": by_guide(ps.EnsembleGuide, kl_weight=1.0),
}
METHODS: dict[str, Callable[..., Any]] = {
    "random": lambda x, y, is_quick: None,
    "Gaussian process": gaussian_process,
    **GUIDES,
}


if __name__ == "__main__":
    main()
