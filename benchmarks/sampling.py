"""Microcanonical Langevin sampling from an ensemble of points, on UCI regressions and against NUTS.

    python -m benchmarks.sampling --data airfoil.npz --split 0 --split 1
    python -m benchmarks.sampling --nuts --chains 128 --steps 10000 --threads 1
    python -m benchmarks.sampling --data airfoil.npz --map-steps 20 --steps 40  # to see that it runs

Nets have four hidden layers of 16 SiLU units, a mean and a noise scale as outputs, and the prior N(0, 1)
on all weights. Each chain starts at its own maximum of the posterior. Files and scaling are as in
``benchmarks.uci``; scores are computed for the mixture over draws, in standardized and in the targets'
own units. R-hat and effective draws are computed for function values at the training inputs.

``--nuts`` samples the league's regression by chains from points and by NUTS. Seconds include the fit of
the points. A longer run of NUTS is the reference: "off by mean" is the distance of means in units of its
standard deviations, and "off by std" the relative distance of standard deviations, both root mean
squares over inputs.
"""

import argparse
import math
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.league_problems import cosine_regression
from benchmarks.markdown import markdown
from benchmarks.rows import ResultsFile
from benchmarks.uci import Split, splits
from benchmarks.uci_tables import SAMPLED, sampling_table
from pyro_structvi import reference

NUTS_HEADER = ["sampler", "R-hat", "ESS", "seconds", "ESS/s", "off by mean", "off by std"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", default=[], help="an .npz file")
    parser.add_argument("--split", type=int, action="append", help="default: the first one")
    parser.add_argument("--nuts", action="store_true", help="the league's small regression")
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--map-steps", type=int, default=1000, help="of the points")
    parser.add_argument(
        "--steps", type=int, default=32_000, help="of each chain, three tenths warm-up"
    )
    parser.add_argument("--samples", type=int, default=200, help="draws of each chain")
    parser.add_argument("--energy-variance", type=float, default=0.4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", reference.NotMixedWarning)  # R-hat is printed
    results = ResultsFile(options.output, SAMPLED)
    for path in options.data:
        every = list(splits(path, gaps=False))
        for number in options.split or [0]:
            if not results.has(path.stem, str(number)):
                results.add(*((path.stem, *row) for row in measure(every[number], options)))
    if options.data:
        print(sampling_table(results.rows))
    if options.nuts:
        print(markdown(NUTS_HEADER, beside_nuts(options)))


def measure(split: Split, options: Any) -> list[tuple[str, ...]]:
    """Return a row of results for the points, and a row for the draws."""
    torch.manual_seed(0)
    model = make_model(split)
    start = time.perf_counter()
    guide = fitted_points(model, split.train, options)
    points = time.perf_counter() - start
    draws = sample(model, guide, split.train, options, energy_variance=options.energy_variance)
    rows = []
    for name, posterior, r_hat, seconds in (
        ("points", guide, "", points),
        ("draws", draws, f"{draws.r_hat:.2f}", points + draws.seconds),
    ):
        x, y = split.test  # without a number of draws: each member, and each draw
        prediction = ps.predict(model, posterior, x, y=y, stream=True)
        error = float((prediction.mean - y).square().mean().sqrt())
        standardized = float(prediction.log_density.mean())
        own = standardized - math.log(split.target_scale)
        scores = (own, error * split.target_scale, standardized, error)
        rows.append((split.name, name, *(f"{v:.5g}" for v in scores), r_hat, f"{seconds:.0f}"))
    return rows


def make_model(split: Split, prior: Any = 1.0) -> ps.Regressor:
    """Return a regressor with four hidden layers of 16 SiLU units and heteroscedastic noise."""
    sizes = [split.train[0].shape[1], 16, 16, 16, 16]
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.SiLU())]
    net = ps.bayesianize(nn.Sequential(*layers, nn.Linear(16, 2)), prior=prior)
    return ps.Regressor(net, noise="heteroscedastic")


def fitted_points(model: Any, data: Any, options: Any) -> Any:
    guide = ps.EnsembleGuide(model, size=options.chains)
    ps.fit(model, guide, data, num_steps=options.map_steps, kl_weight=1.0, progress=False)
    return guide


def sample(model: Any, guide: Any, data: Any, options: Any, **settings: Any) -> Any:
    warmup = 3 * options.steps // 10
    return reference.mclmc(
        *(model, guide, data),
        num_warmup=max(1, warmup),
        num_draws=options.samples,
        thinning=max(1, (options.steps - warmup) // options.samples),
        num_chains=options.chains,
        progress=False,
        **settings,
    )


def beside_nuts(options: Any) -> list[list[str]]:
    """Return a row of the table of effective draws for each sampler."""
    problem = cosine_regression()
    data = problem.x, problem.y
    start = time.perf_counter()
    guide = fitted_points(problem.model, data, options)
    fitting = time.perf_counter() - start
    draws = sample(problem.model, guide, data, options)
    warmup = max(1, options.steps // 20)

    def by_nuts(num_samples: int, seed: int) -> Any:
        return reference.nuts(
            *(problem.model, *data),
            num_warmup=warmup,
            num_samples=max(4, num_samples),
            seed=seed,
            progress=False,
        )

    short, long = by_nuts(warmup, 0), by_nuts(4 * warmup, 1)
    exact = ps.predict(problem.model, long, problem.x).functions
    rows = []
    for name, each, before in (
        ("points, then mclmc", draws, fitting),
        ("NUTS", short, 0.0),
        ("long NUTS", long, 0.0),
    ):
        seconds = before + each.seconds
        row = [name, f"{each.r_hat:.3f}", f"{each.ess:.0f}", f"{seconds:.0f}"]
        own = ps.predict(problem.model, each, problem.x).functions
        distances = ("", "") if each is long else distances_to(exact, own)
        rows.append([*row, f"{each.ess / seconds:.3g}", *distances])
    return rows


def distances_to(exact: Tensor, own: Tensor) -> tuple[str, str]:
    """Return the distances of means and of standard deviations over draws."""
    mean = (own.mean(0) - exact.mean(0)) / exact.std(0)
    std = own.std(0) / exact.std(0) - 1
    return f"{mean.square().mean().sqrt():.3f}", f"{std.square().mean().sqrt():.3f}"


if __name__ == "__main__":
    main()
