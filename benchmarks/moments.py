r"""How far one-pass predictions, by moments, are from those of many draws, and what they cost.

    python -m benchmarks.moments --output benchmarks/results/moments.csv
    python -m benchmarks.moments --data mnist.npz --output benchmarks/results/moments.csv  # and LeNet
    python -m benchmarks.moments --cifar cifar10.npz --draws 2500 --steps 400 --kl-weight 0.1 \
        --output benchmarks/results/moments.csv  # and a ResNet-18
    python -m benchmarks.moments --smoke

Untrained nets of few layers under every structure, then trained nets. Errors of means are in standard
deviations of the draws. What the file of results has is not measured again.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.league_problems import LEAGUE, LeagueProblem
from benchmarks.nets import make_lenet
from benchmarks.paper_tables import HEADER, paper_tables
from benchmarks.rows import ResultsFile
from pyro_structvi.metrics import classification_scores
from pyro_structvi.posterior.prediction import Prediction
from pyro_structvi.testing import guides_for

STRUCTURES = {
    name: make
    for name, make in guides_for("demo").items()
    if name not in ("mean field, drawn", "mixture of 5, k-tied", "Ensemble-U")  # without moments
}
NONLINEARITIES: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "tanh": nn.Tanh,
    "GELU": nn.GELU,
    "sigmoid": nn.Sigmoid,
}
TRAINED = ("mean field", "k-tied, k = 2", "rowwise, joined", "low rank, full diagonal", "FFG-U")
COVARIANCES = ("diagonal", "full")


class Attention(nn.Module):
    """One block of self-attention over positions, with a residual sum and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for sequences ``(batch, positions, 4)``."""
        h = self.embed(x)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        logits: Tensor = self.head(h.mean(1))
        return logits


class LastOutput(nn.Module):
    """A recurrent layer, and a dense one on its last output."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer: Any = layer(4, 16, batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for sequences ``(batch, steps, 4)``."""
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return nets of few layers, by name, with inputs."""
    image = torch.randn(8, 1, 8, 8)
    convolution = nn.Conv2d(1, 8, 3, padding=1)
    return {
        "dense, three layers": (
            nn.Sequential(*(
                nn.Linear(6, 64),
                nn.ReLU(),
                nn.Linear(64, 64),
                nn.ReLU(),
                nn.Linear(64, 3),
            )),
            torch.randn(8, 6),
        ),
        "convolution, max pooling": (
            nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 3)),
            image,
        ),
        "convolution, global average": (
            nn.Sequential(
                *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
                *(nn.Flatten(), nn.Linear(8, 3)),
            ),
            image,
        ),
        "layer normalization": (
            nn.Sequential(
                *(nn.Linear(6, 64), nn.LayerNorm(64, elementwise_affine=False)),
                *(nn.ReLU(), nn.Linear(64, 3)),
            ),
            torch.randn(8, 6),
        ),
        "attention": (Attention(), torch.randn(8, 5, 4)),
        "RNN, 20 steps": (LastOutput(nn.RNN), torch.randn(8, 20, 4)),
        "LSTM, 20 steps": (LastOutput(nn.LSTM), torch.randn(8, 20, 4)),
        "GRU, 20 steps": (LastOutput(nn.GRU), torch.randn(8, 20, 4)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz file of images, for LeNet")
    parser.add_argument("--cifar", type=Path, help="an .npz file of CIFAR-10, for a ResNet-18")
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=2000, help="of training")
    parser.add_argument("--kl-weight", type=float, default=1.0, help="in training")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="few draws and steps, one structure")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    structures = STRUCTURES
    if options.smoke:
        options.draws, options.steps = 50, 5
        structures = {"k-tied, k = 2": STRUCTURES["k-tied, k = 2"]}
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    for seed in range(options.seeds):
        for name, make in structures.items():
            measure_structure(results, name, make, seed, options.draws)
        problems = {name: LEAGUE[name]() for name in ("cosine", "moons", "digits")}
        if options.data:
            problems["LeNet"] = lenet(options.data)
        if options.cifar:
            problems["ResNet-18"] = narrow_resnet(options.cifar)
        for title, problem in problems.items():
            trained = TRAINED if title in LEAGUE else TRAINED[:2]
            for name in trained if not options.smoke else structures:
                measure_net(results, title, problem, name, seed, options)
    if options.output:
        print(paper_tables(options.output))


def measure_structure(
    results: ResultsFile, name: str, make: Callable[..., Any], seed: int, draws: int
) -> None:
    """Measure untrained nets under a structure, if that was not done."""
    for kind, build in NONLINEARITIES.items():
        table = f"Untrained 6-32-3 nets, {kind}"
        if not results.has(table, name, str(seed)):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(6, 32), build(), nn.Linear(32, 3))
            found = compare(net, make, torch.randn(8, 6), draws, COVARIANCES)
            add(results, table, name, seed, found)
    torch.manual_seed(seed)
    for kind, (net, x) in layers().items():
        table = f"Untrained nets: {kind}"
        if not results.has(table, name, str(seed)):
            kinds = COVARIANCES if kind.startswith("dense") else COVARIANCES[:1]
            add(results, table, name, seed, compare(net, make, x, draws // 4, kinds))


def add(results: ResultsFile, table: str, row: str, seed: int, found: dict[str, float]) -> None:
    results.add(*((table, row, str(seed), name, f"{value:.4g}") for name, value in found.items()))


@torch.no_grad()
def compare(
    net: nn.Module, make: Callable[..., Any], x: Tensor, draws: int, kinds: tuple[str, ...]
) -> dict[str, float]:
    """Return errors of the moments of outputs, against those of draws, over inputs and outputs."""
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=10).eval()
    guide = make(model)
    guide.initialize(x)
    for parameter in guide.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    functions = ps.predict(model, guide, x, num_samples=draws).functions
    mean, scale = functions.mean(0), functions.std(0)
    found = {}
    for kind in kinds:
        loc, spread = ps.moments.NetMoments(model, guide, covariance=kind)(x)
        variance = spread if spread.shape == loc.shape else spread.diagonal(dim1=-2, dim2=-1)
        ratio = variance.sqrt() / scale
        kl = 0.5 * (ratio.square() + ((loc - mean) / scale).square() - 1) - ratio.log()
        found |= {
            f"{kind}: bias": float(((loc - mean) / scale).abs().mean()),
            f"{kind}: ratio of standard deviations": float(ratio.mean()),
            f"{kind}: KL, nats": float(kl.mean()),
        }
    return found


def lenet(path: Path) -> LeagueProblem:
    """LeNet on 20,000 images, scored on 500."""
    from examples.papers.data import load_images

    images = load_images("MNIST", path, 20_000)
    model = ps.Classifier(ps.bayesianize(make_lenet(), 0.1), num_data=len(images.x_train))
    x, y = images.x_test[:500], images.y_test[:500]
    title = "LeNet, 20,000 images"
    return LeagueProblem(
        *(title, model, images.x_train, images.y_train, {"test": x}, "classes"),
        batch_size=100,
        scored={"test": y},
    )


def narrow_resnet(path: Path) -> LeagueProblem:
    """A ResNet-18 of a quarter of its width on 20,000 images, scored on 500."""
    from examples.papers.data import load_images
    from examples.papers.ritter2021.resnet import make_net

    images = load_images("CIFAR10", path, 20_000)
    net = ps.bayesianize(make_net(width=16, stride=1), ps.FanIn(), normalization=False)
    x, y = images.x_test[:500], images.y_test[:500]
    return LeagueProblem(
        "ResNet-18 of a quarter of its width, 20,000 images",
        ps.Classifier(net, num_data=len(images.x_train)),
        *(images.x_train, images.y_train, {"test": x}, "classes"),
        batch_size=100,
        scored={"test": y},
    )


def measure_net(
    results: ResultsFile, title: str, problem: LeagueProblem, name: str, seed: int, options: Any
) -> None:
    """Train a net, and measure its predictions by draws and by moments, if that was not done."""
    table = f"Trained: {problem.title}"
    if results.has(table, f"{name}: 100 draws", str(seed)):
        return
    torch.manual_seed(seed)
    guide = STRUCTURES[name](problem.model)
    ps.fit(
        *(problem.model, guide, (problem.x, problem.y)),
        num_steps=options.steps,
        batch_size=problem.batch_size,
        kl_weight=options.kl_weight,
        progress=False,
    )
    *_, x = problem.regions.values()
    y = next(iter(problem.scored.values()), None)
    x = problem.regions["test"] if y is not None else x
    for way, found in predictions(problem, guide, x, y, options.draws // 10).items():
        add(results, table, f"{name}: {way}", seed, found)


def predictions(
    problem: LeagueProblem, guide: Any, x: Tensor, y: Tensor | None, draws: int
) -> dict[str, dict[str, float]]:
    """Return scores and milliseconds of CPU of a hundred draws and of one pass, against many draws."""
    many = ps.predict(problem.model, guide, x, num_samples=draws, y=y, stream=True)
    ways: dict[str, dict[str, Any]] = {
        "100 draws": {"num_samples": 100, "stream": True},
        "one pass": {},
        "one pass, full": {"covariance": "full"},
    }
    found: dict[str, dict[str, float]] = {}
    for way, keywords in ways.items():
        start = time.process_time()
        predict = ps.predict_moments if way.startswith("one pass") else ps.predict
        own = predict(problem.model, guide, x, y=y, **keywords)
        milliseconds = 1e3 * (time.process_time() - start)
        found[way] = distances(problem, own, many)
        if y is not None:
            scores = classification_scores(own.mean, y)
            found[way] |= {"NLL": scores.nll, "ECE": scores.calibration_error}
        found[way]["ms"] = milliseconds
    return found


def distances(problem: LeagueProblem, own: Prediction, many: Prediction) -> dict[str, float]:
    """Return how far a prediction is from that of many draws."""
    scale = many.function_variance.sqrt()
    distance = {}
    if problem.compares == "classes":
        distance["total variation"] = float(0.5 * (own.mean - many.mean).abs().sum(-1).mean())
    return distance | {
        "bias": float(((own.mean - many.mean) / scale).abs().mean()),
        "ratio of standard deviations": float((own.function_variance.sqrt() / scale).mean()),
    }


if __name__ == "__main__":
    main()
