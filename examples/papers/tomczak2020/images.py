"""MNIST by an MLP and by LeNet, with the posteriors of Tomczak, Swaroop and Turner (2020).

    python -m examples.papers.tomczak2020.images --data mnist.npz --output results.csv
    python -m examples.papers.tomczak2020.images --net LeNet --epochs 5 --seeds 1
    python -m examples.papers.tomczak2020.images --paper-size     # the authors' training and draws
    python -m examples.papers.tomczak2020.images --smoke

Nets, priors, the MLP's pixels from -1 to 1 and the constant diagonal exp(-10) are those of the authors'
code. Without ``--data`` the images are downloaded. What the file of results has is not measured again.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from examples.papers.data import Images, load_images
from examples.papers.tomczak2020.posteriors import GUIDES, expected_bound
from pyro_structvi.metrics import classification_scores

PER_PASS = 2000  # images run at once where nothing is trained


class Net(NamedTuple):
    """A net with its prior and the authors' training."""

    make: Callable[[], nn.Module]
    prior: Any
    batch_size: int
    lr: float
    steps: int
    draws: int


def make_mlp() -> nn.Module:
    layers = [nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def make_lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def by_outputs(name: str, parameter: Tensor) -> float:
    """Return the MLP's prior: the precision of a layer is a hundredth of the number of its outputs."""
    return float((0.01 * len(parameter)) ** -0.5)


NETS = {
    "MLP": Net(make_mlp, by_outputs, 2048, 3e-4, 100_000, 2000),
    "LeNet": Net(make_lenet, 0.1, 512, 1e-3, 60_000, 4000),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, default="MLP")
    parser.add_argument("--guide", choices=GUIDES, action="append", help="default: every one")
    parser.add_argument("--data", type=Path, help="an .npz file instead of a download")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument(
        "--draws", type=int, default=100, help="of each posterior, for the test set"
    )
    parser.add_argument("--limit", type=int, help="use only so many images")
    parser.add_argument("--paper-size", action="store_true", help="train as the authors' code does")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.epochs, options.draws, options.limit = 1, 1, 2, 64
    images = Images(*load_images("MNIST", options.data, options.limit))
    images = images._replace(x_train=2 * images.x_train - 1, x_test=2 * images.x_test - 1)
    title = f"MNIST, {options.net}" + (", the authors' training" if options.paper_size else "")
    results = ResultsFile(options.output, HEADER)
    for seed in map(str, range(options.seeds)):
        for name in options.guide or GUIDES:
            if not results.has(title, name, seed):
                scores = measure(NETS[options.net], name, int(seed), images, options)
                results.add(*((title, name, seed, *score) for score in scores.items()))


def measure(net: Net, name: str, seed: int, images: Images, options: Any) -> dict[str, str]:
    """Train one posterior; return what the tables show of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, x_test, y_test = (part.to(device) for part in images)
    torch.manual_seed(seed)
    model = ps.Classifier(ps.bayesianize(net.make().to(device), net.prior), num_data=len(x))
    guide = GUIDES[name](model)
    start = time.process_time()
    ps.fit(model, guide, (x, y), progress=False, **training(net, options))
    seconds = time.process_time() - start
    draws = net.draws if options.paper_size else options.draws
    prediction = ps.predict(
        model, guide, x_test, num_samples=draws, batch_size=PER_PASS, stream=True
    )
    scores = classification_scores(prediction.mean, y_test)
    found = {"test log likelihood": -scores.nll, "error (%)": 100 * (1 - scores.accuracy)}
    if name != "MAP":
        bound, divergence = expected_bound(model, guide, (x, y), PER_PASS)
        found |= {"ELBO / example": bound / len(x), "KL / example": divergence / len(x)}
    found["CPU seconds"] = seconds
    return {quantity: f"{value:.5g}" for quantity, value in found.items()}


def training(net: Net, options: Any) -> dict[str, Any]:
    """Return the arguments of ``fit``: its own optimizer and schedule, or the authors' Adam."""
    if not options.paper_size:
        return {"num_epochs": options.epochs, "batch_size": options.batch_size}
    own = {"num_steps": net.steps, "batch_size": net.batch_size, "lr": lambda step: net.lr}
    return {**own, "optimizer": torch.optim.Adam}


if __name__ == "__main__":
    main()
