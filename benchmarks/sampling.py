"""Microcanonical Langevin sampling from an ensemble of points, on UCI regressions and against NUTS.

    python -m benchmarks.sampling --data airfoil.npz --split 0 --split 1
    python -m benchmarks.sampling --nuts --chains 128 --steps 10000 --threads 1
    python -m benchmarks.sampling --data airfoil.npz --map-steps 20 --steps 40  # to see that it runs

Nets have four hidden layers of 16 SiLU units, a mean and a noise scale as outputs, and the prior N(0, 1)
on all weights. Each chain starts at its own maximum of the posterior. Files and scaling are as in
``benchmarks.uci``; scores are computed for the mixture over draws, in standardized and in the targets'
own units. R-hat and effective draws are computed for function values at the training inputs.
"""

import argparse
import math
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    """Return a row of the table of effective draws for each sampler.

    The last sampler is the reference for the distances of the others: root mean squares over inputs, of
    means in units of its standard deviation, and of ratios of standard deviations less one.
    """
    problem = cosine_regression()
    data = problem.x, problem.y
    start = time.perf_counter()
    guide = fitted_points(problem.model, data, options)
    seconds = {"points, then mclmc": time.perf_counter() - start}  # before the sampler begins
    found = {"points, then mclmc": sample(problem.model, guide, data, options)}
    warmup = max(1, options.steps // 20)
    for name, number, seed in (("NUTS", warmup, 0), ("long NUTS", 4 * warmup, 1)):
        found[name] = reference.nuts(
            *(problem.model, *data),
            num_warmup=warmup,
            num_samples=max(4, number),
            seed=seed,
            progress=False,
        )
    functions = {
        name: ps.predict(problem.model, draws, problem.x).functions for name, draws in found.items()
    }
    *_, last = functions.values()
    rows = []
    for name, d in found.items():
        own = functions[name]
        mean = ((own.mean(0) - last.mean(0)) / last.std(0)).square().mean().sqrt()
        std = (own.std(0) / last.std(0) - 1).square().mean().sqrt()
        total = d.seconds + seconds.get(name, 0.0)
        numbers = [f"{d.r_hat:.3f}", f"{d.ess:.0f}", f"{total:.0f}", f"{d.ess / total:.3g}"]
        distances = ["", ""] if own is last else [f"{mean:.3f}", f"{std:.3f}"]
        rows.append([name, *numbers, *distances])
    return rows


if __name__ == "__main__":
    main()
