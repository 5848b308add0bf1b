"""Bayesian optimization by posteriors over nets, by a Gaussian process, and by random search.

    python -m benchmarks.bayesian_optimization --trials 5 --output FILE.csv
    python -m benchmarks.bayesian_optimization --problem Branin --method "Gaussian process"
    python -m benchmarks.bayesian_optimization --problem Branin --quick          # to see that it runs

All methods but "random" maximize ``qLogExpectedImprovement`` of BoTorch over batches of inputs, from the
same random start in each trial, and see standardized outcomes. Nets have one hidden layer of 50 sines,
whose prior over functions is nearly stationary (Meronen et al. 2021), the prior ``FanIn(2.0, 3.0)`` and
noise 0.05. With "learned scales" each input has a scale, as the length scales of a Gaussian process, and
the noise is learned. "chains" samples from 8 points by ``reference.mclmc``. The Gaussian process is
``SingleTaskGP``, and "VBLL" the ``VBLLModel`` of ``botorch_community`` (``pip install vbll``), both with
their defaults. What the file of results has is not measured again; give ``--quick`` a file of its own.
"""

import argparse
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold, cross_val_score
from sklearn.svm import SVR
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.optimization_table import OPTIMIZATION, optimization_table
from benchmarks.rows import ResultsFile
from pyro_structvi.botorch import StructuredModel
from pyro_structvi.reference import mclmc


class Problem(NamedTuple):
    """The function of a trial, the number of random inputs, and rounds of batches of inputs."""

    make_function: Callable[[int], Any]
    start: int
    rounds: int
    batch: int


class DrawnNet:
    """A function of ten inputs: a net of two hidden layers of 50 units with random weights."""

    dim, bounds = 10, torch.tensor([[-1.0], [1.0]]).expand(2, 10)

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.weights = [
            scale * torch.randn(rows, columns, generator=random)
            for scale, rows, columns in ((1.0, 10, 50), (0.3, 50, 50), (0.15, 50, 1))
        ]
        self.optimal_value = self._maximum(random)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values at inputs of shape ``(..., 10)``."""
        for weight in self.weights[:-1]:
            x = (x @ weight.to(x)).tanh()
        return (x @ self.weights[-1].to(x)).squeeze(-1)

    def _maximum(self, random: torch.Generator) -> float:
        """Return the best of 512 local maxima."""
        x = (2 * torch.rand(512, self.dim, generator=random) - 1).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.03)
        for _ in range(500):
            optimizer.zero_grad()
            (-self(x).sum()).backward()
            optimizer.step()
            x.data.clamp_(-1.0, 1.0)
        return float(self(x).detach().max())


class SupportVectors:
    """The error of a support vector regression: its penalty, its margin, and scales of ten inputs.

    The value is minus the cross-validated root mean squared error on scikit-learn's diabetes data. The
    maximum is unknown, so that the "regret" is the error.
    """

    dim, optimal_value = 12, 0.0
    bounds = torch.tensor([[0.0, -1.0] + [-2.0] * 10, [3.0, 2.0] + [1.0] * 10])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values at inputs of shape ``(n, 12)``."""
        return torch.tensor([self._value(row) for row in x], dtype=x.dtype)

    @staticmethod
    def _value(x: Tensor) -> float:
        features, targets = load_diabetes(return_X_y=True)
        scaled = features / features.std(0) * (10 ** x[2:]).numpy()
        machine = SVR(C=float(10 ** x[0]), epsilon=float(10 ** x[1]), gamma=0.1, max_iter=50_000)
        folds = KFold(5, shuffle=True, random_state=0)
        score = "neg_root_mean_squared_error"
        return float(cross_val_score(machine, scaled, targets, cv=folds, scoring=score).mean())


PROBLEMS = {
    "Branin": Problem(lambda trial: Branin(negate=True), 6, 8, 3),
    "Hartmann 6": Problem(lambda trial: Hartmann(6, negate=True), 20, 10, 4),
    "Ackley 10": Problem(lambda trial: Ackley(10, negate=True), 30, 10, 6),
    "drawn net 10": Problem(DrawnNet, 30, 10, 6),
    "support vectors 12": Problem(lambda trial: SupportVectors(), 30, 10, 6),
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
    """Return the regret of the best value that was found, and the processor's seconds of a fit."""
    function, rounds = problem.make_function(trial), 2 if is_quick else problem.rounds
    low, high = function.bounds
    torch.manual_seed(trial)
    x = torch.rand(problem.start, function.dim)
    y = function(low + (high - low) * x).unsqueeze(-1)
    seconds = 0.0
    for _ in range(rounds):
        start = time.process_time()
        outcomes = (y - y.mean()) / y.std()
        model = METHODS[method](x, outcomes, is_quick)
        seconds += time.process_time() - start
        new = suggest(model, x, outcomes, problem.batch)
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
    process = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(process.likelihood, process))
    return process


def vbll(x: Tensor, y: Tensor, is_quick: bool) -> Any:
    """A variational last layer of a net (Harrison et al. 2024)."""
    from botorch_community.models.vblls import VBLLModel

    model = VBLLModel(in_features=x.shape[1], hidden_features=64, out_features=1)
    model.fit(x, y, optimization_settings={"num_epochs": 5} if is_quick else None)
    return model


class Sine(nn.Module):
    """The sine of each unit."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sine."""
        return x.sin()


def fitted(
    x: Tensor,
    y: Tensor,
    is_quick: bool,
    make_guide: Callable[..., Any],
    learns_scales: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Return the model of a net and a guide that is fitted to it."""
    net = nn.Sequential(nn.Linear(x.shape[1], 50), Sine(), nn.Linear(50, 1))
    prior: Any = ps.FanIn(2.0, 3.0)
    noise: Any = 0.05
    if learns_scales:
        scales = dist.LogNormal(math.log(0.25), 1.0).expand([x.shape[1]])
        prior = {"0.weight": ps.HierarchicalScale(scales, fan_in=True), "*": prior}
        noise = dist.LogNormal(math.log(noise), 1.0)
    model = ps.Regressor(ps.bayesianize(net, prior), noise=noise, standardize=(x, y))
    guide = make_guide(model)
    steps = 20 if is_quick else 600
    ps.fit(model, guide, (x, y), num_steps=steps, progress=False, compiled="traced", **options)
    return model, guide


def by_guide(make_guide: Callable[..., Any], **options: Any) -> Callable[..., StructuredModel]:
    """Return the method of a guide, with arguments of ``fit``."""

    def method(x: Tensor, y: Tensor, is_quick: bool) -> StructuredModel:
        model, guide = fitted(x, y, is_quick, make_guide, **options)
        return StructuredModel(model, guide, (x, y))

    return method


def chains(x: Tensor, y: Tensor, is_quick: bool) -> StructuredModel:
    """Langevin chains from the points of an ensemble."""
    make_points = partial(ps.EnsembleGuide, size=8)
    model, points = fitted(x, y, is_quick, make_points, kl_weight=1.0)
    lengths = {"num_warmup": 20, "num_draws": 4} if is_quick else {"num_draws": 16}
    draws = mclmc(
        model, points, (x, y), **({"num_warmup": 1000} | lengths), compiled=False, progress=False
    )
    return StructuredModel(model, draws, (x, y))


METHODS: dict[str, Callable[..., Any]] = {
    "random": lambda x, y, is_quick: None,
    "Gaussian process": gaussian_process,
    "global inducing": by_guide(ps.GlobalInducingGuide),
    "global inducing, learned scales": by_guide(ps.GlobalInducingGuide, learns_scales=True),
    "matrix normal": by_guide(ps.MatrixNormalGuide),
    "mean field": by_guide(ps.MeanFieldGuide),
    "ensemble of 5": by_guide(ps.EnsembleGuide, kl_weight=1.0),
    "chains": chains,
    "VBLL": vbll,
}


if __name__ == "__main__":
    main()
