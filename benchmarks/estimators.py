"""Estimators for tables on UCI regressions: ours, points, and those of other packages.

    python -m benchmarks.estimators --data boston.npz --data energy.npz --splits 20 --output FILE.csv
    python -m benchmarks.estimators --data energy.npz --method chains --method "Gaussian process"
    python -m benchmarks.estimators --data energy.npz --splits 1 --quick      # to see that it runs

Files, splits and scaling are as in ``benchmarks.uci``. "chains" has ``refine=True`` and "points"
``refine=False`` of ``BayesianMLPRegressor``. Its default is "chains" up to 10,000 examples, and
"mixture" above. "no skip" has ``skip=False``, and so has "deep ensemble", ten nets with two hidden
layers of 50 ReLU units, early stopping and the same Student's t noise. XGBoost has 500 trees of depth 4
at a rate of 0.05; it has no predictive density. ``bde`` (``pip install sklearn-contrib-bde``) has our
net, with the defaults of its energy variance. What the file of results has is not measured again.
"""

import argparse
import math
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from benchmarks.rows import ResultsFile
from benchmarks.uci import Split, splits
from benchmarks.uci_tables import ESTIMATORS, estimators_table
from pyro_structvi.sklearn import BayesianMLPRegressor

Score = tuple[Any, Any]  # predictions, and log densities or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="an .npz file")
    parser.add_argument("--splits", type=int, default=20, help="how many of them")
    parser.add_argument("--gaps", action="store_true", help="gap splits in place of random ones")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: ours and GP")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = ResultsFile(options.output, ESTIMATORS)
    title = "gaps of {}" if options.gaps else "{}"
    found = {
        title.format(path.stem): list(splits(path, options.gaps))[: options.splits]
        for path in options.data
    }
    for number, data in product(range(options.splits), found):
        for method in options.method or OWN:
            if number < len(found[data]) and not results.has(data, str(number), method):
                row = measure(found[data][number], METHODS[method], options.quick)
                results.add((data, str(number), method, *row))
    print(estimators_table(results.rows))


def measure(split: Split, method: Callable[..., Score], is_quick: bool) -> tuple[str, ...]:
    """Return log likelihood, RMSE and seconds of a method, in units of the targets."""
    (x, y), (test_x, test_y) = (
        [part.double().numpy() for part in pair] for pair in (split.train, split.test)
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels at the bounds of their parameters
        prediction, log_density = method(x, y[:, 0], test_x, test_y[:, 0], is_quick)
    seconds = time.perf_counter() - start
    error = np.sqrt(np.mean((prediction - test_y[:, 0]) ** 2)) * split.target_scale
    density = ""
    if log_density is not None:
        density = f"{np.mean(log_density) - math.log(split.target_scale):.5g}"
    return density, f"{error:.5g}", f"{seconds:.0f}"


def bayesian_mlp(*args: Any, **options: Any) -> Callable[..., Score]:
    """Return the method of an estimator of ours."""

    def method(x: Any, y: Any, test_x: Any, test_y: Any, is_quick: bool) -> Score:
        few = {"num_steps": 20, "num_sampling_steps": 40, "num_members": 2} if is_quick else {}
        estimator = BayesianMLPRegressor(*args, random_state=0, **(options | few)).fit(x, y)
        return estimator.predict(test_x), estimator.log_density(test_x, test_y)

    return method


def gaussian_process(x: Any, y: Any, test_x: Any, test_y: Any, is_quick: bool) -> Score:
    """A Gaussian process with one length scale for each input."""
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel(0.1)
    optimizer = None if is_quick else "fmin_l_bfgs_b"
    process = GaussianProcessRegressor(kernel, optimizer=optimizer, random_state=0).fit(x, y)
    mean, std = process.predict(test_x, return_std=True)
    return mean, norm.logpdf(test_y, mean, std)


def xgboost(x: Any, y: Any, test_x: Any, test_y: Any, is_quick: bool) -> Score:
    """Boosted trees, which have no density."""
    from xgboost import XGBRegressor

    trees = XGBRegressor(
        n_estimators=10 if is_quick else 500,
        max_depth=4,
        learning_rate=0.05,
        subsample=0.8,
        n_jobs=1,
        random_state=0,
    )
    return trees.fit(x, y).predict(test_x), None


def bde(times: int) -> Callable[..., Score]:
    """Return the method of Bayesian deep ensembles by microcanonical Langevin chains in JAX."""

    def method(x: Any, y: Any, test_x: Any, test_y: Any, is_quick: bool) -> Score:
        from bde import BdeRegressor

        epochs, warmup, thinning = (20, 20, 1) if is_quick else (1000, 5000 * times, 10 * times)
        estimator = BdeRegressor(
            n_members=10,
            hidden_layers=[16, 16, 16, 16],
            epochs=epochs,
            patience=20,
            warmup_steps=warmup,
            n_samples=thinning * (4 if is_quick else 100),
            n_thinning=thinning,
        ).fit(x, y)
        raw = np.asarray(estimator.predict(test_x, raw=True), np.float64)
        mean, free = (raw[..., column].reshape(-1, len(test_x)) for column in (0, 1))
        densities = norm.logpdf(test_y, mean, np.logaddexp(0, free) + 1e-6)
        return mean.mean(0), np.logaddexp.reduce(densities, 0) - math.log(len(densities))

    return method


METHODS: dict[str, Callable[..., Score]] = {
    "chains": bayesian_mlp(refine=True),
    "chains, normal prior": bayesian_mlp(prior_df=None),
    "chains, normal noise": bayesian_mlp(noise_df=None),
    "chains, learned noise": bayesian_mlp(noise_df="learned"),
    "chains, energy variance 0.02": bayesian_mlp(energy_variance=0.02),
    "points": bayesian_mlp(refine=False),
    "points, no skip": bayesian_mlp(refine=False, skip=False),
    "mixture": bayesian_mlp(posterior="mixture", refine=False),
    "mixture, no skip": bayesian_mlp(posterior="mixture", refine=False, skip=False),
    "matrix normal": bayesian_mlp(posterior="matrix_normal", refine=False),
    "deep ensemble": bayesian_mlp((50, 50), activation="relu", refine=False, skip=False),
    "Gaussian process": gaussian_process,
    "XGBoost": xgboost,
    "bde": bde(1),
    "bde, 4 times the steps": bde(4),
}
OWN = ("chains", "points", "mixture", "matrix normal", "deep ensemble", "Gaussian process")


if __name__ == "__main__":
    main()
