"""Test log likelihood and RMSE on UCI regressions, beside published numbers.

    python -m benchmarks.uci --data boston.npz --data energy.npz --output benchmarks/results/uci.csv
    python -m benchmarks.uci --data energy.npz --gaps      # the middle third of each input is the test
    python -m benchmarks.uci --data energy.npz --splits 1 --steps 20 --draws 10  # to see that it runs

A file has ``x``, ``y``, ``train_idx`` and ``test_idx (splits, examples)``: the splits of
Hernandez-Lobato and Adams (2015). One hidden layer of 50 ReLU units (100 for protein); inputs and
targets are standardized by the training part; prior scales of weights are learned
(``HierarchicalScale``), and so is the noise, one number or heteroscedastic. One recipe for all sets: the
defaults of ``fit``. Points learn a noise of nearly nothing once they fit every example, so a tenth of
their training part is held out, and the fit ends where its likelihood is best. What the file of results
has is not measured again.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.rows import ResultsFile
from benchmarks.uci_tables import HEADER, HETEROSCEDASTIC, uci_tables

GUIDES: dict[str, Callable[[Any], nn.Module]] = {
    "MAP": ps.MAPGuide,
    "ensemble of 5": ps.EnsembleGuide,
    "mean field": ps.MeanFieldGuide,
    "k-tied, k = 2": lambda model: ps.KTiedGuide(model, join_bias=False),
    "matrix normal": lambda model: ps.MatrixNormalGuide(model, join_bias=True),
    "rowwise": lambda model: ps.RowwiseGuide(model, join_bias=True),
    "low rank, full diagonal": lambda model: ps.AutoLowRankLRT(
        model, rank=5, diagonal="full", join_bias=True
    ),
    "FFG-U": lambda model: ps.InducingWeightGuide(model, (20, 20)),
    "global inducing": ps.GlobalInducingGuide,
}
POINTS = ("MAP", "ensemble of 5")
PRIOR = {"*.weight": ps.HierarchicalScale(dist.LogNormal(0.0, 0.5), fan_in=True), "*": 1.0}
# Weights and their scale have their highest density near zero: for points the scale is its median.
POINTS_PRIOR = {"*.weight": ps.FanIn(1.0), "*": 1.0}
ESTIMATORS = {"draws": "", "moments": ", by moments"}  # and what a row's name then ends in
NOISES = (HETEROSCEDASTIC, "learned")
LARGEST_BATCH = 500
EARLY = {"every": 50, "patience": 10}  # of points, which stop early


class Split(NamedTuple):
    """Training and test part, standardized, and what a standardized target is worth."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    target_scale: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="an .npz file")
    parser.add_argument("--guide", choices=GUIDES, action="append", help="default: every guide")
    parser.add_argument("--noise", choices=NOISES, action="append", help="default: both")
    parser.add_argument("--gaps", action="store_true", help="gap splits in place of random ones")
    parser.add_argument("--splits", type=int, default=20, help="how many of them")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--estimator", choices=ESTIMATORS, default="draws", help="of the bound")
    parser.add_argument("--draws", type=int, default=500, help="of each posterior")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    for path in options.data:
        for split in list(splits(path, options.gaps))[: options.splits]:
            for noise in options.noise or NOISES:
                for guide in options.guide or GUIDES:
                    row = f"{guide}{ESTIMATORS[options.estimator]}"
                    key = (path.stem, split.name, noise, row)
                    if not results.has(*key):
                        torch.manual_seed(0)
                        prior = POINTS_PRIOR if guide in POINTS else PRIOR
                        model = make_model(split, noise, units_of(path.stem), prior)
                        found = measure(
                            *(split, model, GUIDES[guide](model), options.steps, options.draws),
                            stops_early=guide in POINTS,
                            elbo=ps.StructuredELBO(estimator=options.estimator),
                        )
                        results.add((*key, *(digits(found[name]) for name in HEADER[4:])))
    print(uci_tables(results.rows))


def splits(path: Path, gaps: bool) -> Iterator[Split]:
    """Yield the random splits of a file, or one for each input whose middle third is the test."""
    data = np.load(path)
    x, y = data["x"], data["y"].reshape(len(data["x"]), -1)
    if not gaps:
        for number, (train, test) in enumerate(
            zip(data["train_idx"], data["test_idx"], strict=True)
        ):
            yield standardized(str(number), x, y, train, test)
        return
    for column in range(x.shape[1]):
        order = x[:, column].argsort(kind="stable")
        third = len(order) // 3
        train = np.concatenate([order[:third], order[2 * third :]])
        yield standardized(f"gap {column}", x, y, train, order[third : 2 * third])


def standardized(name: str, x: Any, y: Any, train: Any, test: Any) -> Split:
    parts = []
    for values in (x, y):
        center, spread = values[train].mean(0), values[train].std(0)
        scaled = (values - center) / np.where(spread > 0, spread, 1)
        parts.append(torch.tensor(scaled, dtype=torch.get_default_dtype()))
    inputs, targets = parts
    scale = float(y[train].std())
    return Split(name, (inputs[train], targets[train]), (inputs[test], targets[test]), scale)


def held_out(split: Split) -> Split:
    """Return a split of the training part alone, with a fifth of it as test: to choose a recipe by."""
    x, y = (part.numpy() for part in split.train)
    order = np.random.default_rng(0).permutation(len(x))
    fifth = len(order) // 5
    inner = standardized(split.name, x, y, order[fifth:], order[:fifth])
    return inner._replace(target_scale=inner.target_scale * split.target_scale)


def make_model(split: Split, noise: Any, units: int, prior: Any = PRIOR) -> ps.Regressor:
    """Return a net of one hidden layer; ``noise`` may also be a number, in the standardized units."""
    inputs, outputs = split.train[0].shape[1], 2 if noise == HETEROSCEDASTIC else 1
    net = nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, outputs))
    own = dist.LogNormal(-1.0, 1.0) if noise == "learned" else noise
    return ps.Regressor(ps.bayesianize(net, prior), noise=own)


def units_of(name: str) -> int:
    return 100 if name == "protein" else 50


def digits(value: float) -> str:
    return f"{value:.5g}"


def measure(
    split: Split,
    model: ps.Regressor,
    guide: nn.Module,
    steps: int,
    draws: int,
    stops_early: bool = False,
    **options: Any,
) -> dict[str, float]:
    """Train; return test log likelihood and RMSE in the targets' own units, ELBO and seconds of CPU."""
    train = split.train
    if stops_early:
        order = torch.randperm(len(train[0]))
        kept, held = order[len(order) // 10 :], order[: len(order) // 10]
        other = tuple(part[held] for part in train)
        options |= {"kl_weight": 1.0, "validation": ps.Validation(other, **EARLY)}
        train = tuple(part[kept] for part in train)
    size = len(train[0])
    start = time.process_time()
    history = ps.fit(
        *(model, guide, train),
        num_steps=steps,
        batch_size=LARGEST_BATCH if size > 2 * LARGEST_BATCH else None,
        progress=False,
        **options,
    )
    seconds = time.process_time() - start
    x, y = split.test
    prediction = ps.predict(model, guide, x, num_samples=draws, y=y, stream=True)
    return {
        "log likelihood": float(prediction.log_density.mean()) - math.log(split.target_scale),
        "RMSE": float((prediction.mean - y).square().mean().sqrt()) * split.target_scale,
        "ELBO": fmean(history.elbo[-(steps // 10) :]),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
