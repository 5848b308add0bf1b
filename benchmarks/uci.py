"""Test log likelihood and RMSE on UCI regressions, beside published numbers.

    python -m benchmarks.uci --data boston.npz --data energy.npz --output benchmarks/results/uci.csv
    python -m benchmarks.uci --data energy.npz --gaps      # the middle third of each input is the test
    python -m benchmarks.uci --data energy.npz --splits 1 --steps 20 --draws 10  # to see that it runs

A file has ``x``, ``y``, ``train_idx`` and ``test_idx (splits, examples)``: the splits of
Hernandez-Lobato and Adams (2015). One hidden layer of 50 ReLU units (100 for protein); inputs and
targets are standardized by the training part; prior scales of weights are learned
(``HierarchicalScale``), and so is the noise, one number or heteroscedastic. One recipe for all sets: the
defaults of ``fit``. What the file of results has is not measured again.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.rows import ResultsFile
from benchmarks.uci_tables import HEADER, uci_tables

GUIDES: dict[str, Callable[[Any], nn.Module]] = {
    "MAP": ps.MAPGuide,
    "ensemble of 5": ps.EnsembleGuide,
    "mean field": ps.MeanFieldGuide,
    "k-tied, k = 2": ps.KTiedGuide,
    "matrix normal": lambda model: ps.MatrixNormalGuide(model, join_bias=True),
    "rowwise": lambda model: ps.RowwiseGuide(model, join_bias=True),
    "low rank, full diagonal": lambda model: ps.AutoLowRankLRT(
        model, rank=5, diagonal="full", join_bias=True
    ),
    "FFG-U": lambda model: ps.InducingWeightGuide(model, (20, 20)),
}
NOISES = ("heteroscedastic", "learned")
LARGEST_BATCH = 500


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
    parser.add_argument("--draws", type=int, default=500, help="of each posterior")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    for path in options.data:
        options.name = path.stem
        for split in list(splits(path, options.gaps))[: options.splits]:
            for noise in options.noise or NOISES:
                for guide in options.guide or GUIDES:
                    key = (path.stem, split.name, noise, guide)
                    if not results.has(*key):
                        results.add((*key, *measure(split, noise, guide, options)))
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
        parts.append(torch.tensor(scaled, dtype=torch.float32))
    inputs, targets = parts
    scale = float(y[train].std())
    return Split(name, (inputs[train], targets[train]), (inputs[test], targets[test]), scale)


def make_model(split: Split, noise: str, units: int) -> ps.Regressor:
    inputs, outputs = split.train[0].shape[1], 2 if noise == "heteroscedastic" else 1
    net = nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, outputs))
    prior = {"*.weight": ps.HierarchicalScale(dist.LogNormal(0.0, 0.5), fan_in=True), "*": 1.0}
    net = ps.bayesianize(net, prior)
    return ps.Regressor(
        net, noise=noise if noise == "heteroscedastic" else dist.LogNormal(-1.0, 1.0)
    )


def measure(split: Split, noise: str, guide_name: str, options: Any) -> tuple[str, ...]:
    """Return test log likelihood and RMSE in the targets' own units, and seconds of CPU."""
    torch.manual_seed(0)
    model = make_model(split, noise, 100 if options.name == "protein" else 50)
    guide = GUIDES[guide_name](model)
    size = len(split.train[0])
    start = time.process_time()
    ps.fit(
        *(model, guide, split.train),
        num_steps=options.steps,
        batch_size=LARGEST_BATCH if size > 2 * LARGEST_BATCH else None,
        progress=False,
    )
    seconds = time.process_time() - start
    x, y = split.test
    prediction = ps.predict(model, guide, x, options.draws, y=y, stream=True)
    density = float(prediction.log_density.mean()) - math.log(split.target_scale)
    error = float((prediction.mean - y).square().mean().sqrt()) * split.target_scale
    return f"{density:.5g}", f"{error:.5g}", f"{seconds:.3g}"


if __name__ == "__main__":
    main()
