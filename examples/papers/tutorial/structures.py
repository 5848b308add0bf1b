"""Dropout, matrix normal and Walsh-Hadamard beside mean field, on images and on a regression.

    python -m examples.papers.tutorial.structures --data cifar10.npz --output results.csv
    python -m examples.papers.tutorial.structures --regression energy.npz --seeds 3
    python -m examples.papers.tutorial.structures --net ResNet-18 --epochs 200     # on a GPU
    python -m examples.papers.tutorial.structures --smoke

CIFAR-10 without augmentation, by default with LeNet; a regression is a file with ``x``, ``y``,
``train_idx`` and ``test_idx``, of which each split counts as a seed, by one hidden layer of 50 ReLU
units. Without ``--data`` the images are downloaded. What the file of results has is not measured again.
"""

import argparse
import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import nn

import pyro_structvi as ps
from benchmarks.nets import make_resnet18
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from benchmarks.uci import Split, splits
from examples.papers.data import Images, load_images
from pyro_structvi.families import Dropout, PointEstimate
from pyro_structvi.metrics import classification_scores

PRIOR = ps.FanIn(math.sqrt(2))


class Structure(NamedTuple):
    """A guide, and what stands in the place of the net's layers."""

    guide: Callable[[Any], nn.Module]
    layers: dict[str, Any] | None = None


def dropout(model: Any) -> nn.Module:
    """Return Monte Carlo dropout that keeps the inputs of the net."""
    first, *_ = ps.MAPGuide(model).site_names
    return ps.StructuredGuide(model, {first: PointEstimate(), "*": Dropout(rate=0.1)})


STRUCTURES = {
    "MAP": Structure(ps.MAPGuide),
    "MC dropout": Structure(dropout),
    "diagonal": Structure(ps.MeanFieldGuide),
    "matrix normal": Structure(lambda model: ps.MatrixNormalGuide(model, join_bias=True)),
    "Walsh-Hadamard, diagonal": Structure(ps.MeanFieldGuide, {"*": ps.WalshHadamard()}),
    "Walsh-Hadamard, full": Structure(ps.FullCovarianceGuide, {"*": ps.WalshHadamard()}),
}


def make_lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


NETS = {"LeNet": make_lenet, "ResNet-18": make_resnet18}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz file instead of a download")
    parser.add_argument("--regression", type=Path, help="an .npz file; no images then")
    parser.add_argument("--net", choices=NETS, default="LeNet")
    parser.add_argument("--structure", choices=STRUCTURES, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6, help="on the images")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000, help="of the regression")
    parser.add_argument("--draws", type=int, default=50, help="of each posterior")
    parser.add_argument("--smoke", action="store_true", help="random images and a few steps")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.epochs, options.steps, options.draws = 1, 1, 10, 2
    results = ResultsFile(options.output, HEADER)
    title, runs = regressions(options) if options.regression else images(options)
    for seed, run in runs.items():
        for name in options.structure or STRUCTURES:
            row = name if options.regression else f"{options.net}, {name}"
            if not results.has(title, row, seed):
                torch.manual_seed(int(seed))
                scores = run(STRUCTURES[name])
                found = ((quantity, f"{value:.6g}") for quantity, value in scores.items())
                results.add(*((title, row, seed, *score) for score in found))


Runs = dict[str, Callable[[Structure], dict[str, float]]]


def images(options: Any) -> tuple[str, Runs]:
    data = random_images() if options.smoke else load_images("CIFAR10", options.data)
    return "CIFAR-10", {
        str(seed): lambda structure: classify(structure, data, options)
        for seed in range(options.seeds)
    }


def regressions(options: Any) -> tuple[str, Runs]:
    def run_of(split: Split) -> Callable[[Structure], dict[str, float]]:
        return lambda structure: regress(structure, split, options)

    found = islice(splits(options.regression, gaps=False), options.seeds)
    return f"UCI, {options.regression.stem}", {split.name: run_of(split) for split in found}


def random_images() -> Images:
    x, y = torch.rand(16, 3, 32, 32), torch.arange(16) % 10
    return Images(x, y, x, y)


def classify(structure: Structure, data: Images, options: Any) -> dict[str, float]:
    """Train on the images; return the tutorial's columns, and what they cost."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, x_test, y_test = (part.to(device) for part in data)
    x, x_test = ((part - 0.5) / 0.25 for part in (x, x_test))
    net = NETS[options.net]().to(device)
    bayes_net = ps.bayesianize(net, PRIOR, normalization=False, layers=structure.layers)
    model = ps.Classifier(bayes_net, num_data=len(x))
    size = {"num_epochs": options.epochs, "batch_size": options.batch_size}
    guide, seconds = train(structure, model, (x, y), **size)
    prediction = ps.predict(
        model, guide, x_test, num_samples=options.draws, batch_size=1000, stream=True
    )
    scores = classification_scores(prediction.mean, y_test)
    return {
        "accuracy (%)": 100 * scores.accuracy,
        "NLL": scores.nll,
        "ECE": scores.calibration_error,
        **costs(model, guide, seconds),
    }


def regress(structure: Structure, split: Split, options: Any) -> dict[str, float]:
    """Train on one split; return density and error in the targets' own units."""
    net = nn.Sequential(nn.Linear(split.train[0].shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    bayes_net = ps.bayesianize(net, PRIOR, layers=structure.layers)
    model = ps.Regressor(bayes_net, noise=dist.LogNormal(-1.0, 1.0))
    guide, seconds = train(structure, model, split.train, num_steps=options.steps)
    x, y = split.test
    prediction = ps.predict(model, guide, x, num_samples=10 * options.draws, y=y, stream=True)
    return {
        "test log likelihood": float(prediction.log_density.mean()) - math.log(split.target_scale),
        "RMSE": float((prediction.mean - y).square().mean().sqrt()) * split.target_scale,
        **costs(model, guide, seconds),
    }


def train(
    structure: Structure, model: Any, data: tuple[Any, Any], **size: int
) -> tuple[nn.Module, float]:
    guide = structure.guide(model)
    start = time.process_time()
    ps.fit(model, guide, data, progress=False, **size)
    return guide, time.process_time() - start


def costs(model: nn.Module, guide: nn.Module, seconds: float) -> dict[str, float]:
    trained = sum(p.numel() for part in (model, guide) for p in part.parameters())
    return {"parameters": trained, "CPU seconds": seconds}


if __name__ == "__main__":
    main()
