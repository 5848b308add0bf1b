"""Figures 3, 4 and 6 on a small net: run time and size, caps and sizes of U, pruning; digits of MNIST.

    python -m examples.papers.ritter2021.small_net --data mnist.npz --output results.csv

The paper has ResNets on CIFAR here; a net of 784-400-400-10 stands in for them, so that all runs take
minutes on a CPU. Without a file the data are downloaded by torchvision.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from examples.papers.data import Images, load_images
from pyro_structvi.families import MeanField
from pyro_structvi.metrics import classification_scores
from pyro_structvi.posterior.pruning import prune_inducing_factors, prune_mean_field

SIZE, MAX_CONDITIONAL, MAX_INDUCING = 32, 0.03, 0.1
SIZES = (4, 8, 16, 32, 64)
CAPS = (0.01, 0.03, 0.1, 0.3, 1.0)
SHARES_LEFT = {"FFG-U": (1.0, 0.5, 0.25, 0.1), "FFG-W": (1.0, 0.5, 0.1, 0.01)}
COUNTS = (1, 4, 16)
TABLES = {
    "cost": "Figure 3: time of a prediction and size, relative to deterministic nets; MNIST",
    "ablation": "Figure 4: size of U and caps; MNIST",
    "pruning": "Figure 6: pruning; MNIST",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz file of MNIST")
    parser.add_argument("--part", choices=TABLES, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--limit", type=int, default=10_000, help="images of each part")
    parser.add_argument("--width", type=int, default=400)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    parser.add_argument("--paper-size", action="store_true", help="all images, more epochs")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    options = parser.parse_args()
    if options.paper_size:
        options.limit, options.epochs = None, 100
    if options.smoke:
        options.limit, options.epochs, options.width, options.draws = 32, 1, 8, 2
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    images = load_images("MNIST", options.data, options.limit)
    images = Images(*(each.to(options.device) for each in images))
    results = ResultsFile(options.output, HEADER)
    for part in options.part or TABLES:
        for seed in range(options.seeds):
            PARTS[part](images, seed, options, results)


# ---- the net and its posteriors ------------------------------------------------------------------


def make_model(images: Images, options: Any) -> ps.Classifier:
    width = options.width
    net = nn.Sequential(
        *(nn.Flatten(), nn.Linear(images.x_train[0].numel(), width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
    )
    net = ps.bayesianize(net, ps.FanIn(2**0.5, vector_scale=1.0)).to(options.device)
    return ps.Classifier(net, num_data=len(images.x_train))


def inducing(
    model: Any,
    size: int = SIZE,
    max_conditional: float | None = MAX_CONDITIONAL,
    max_inducing: float | None = MAX_INDUCING,
) -> ps.StructuredGuide:
    """Return FFG-U with caps."""
    return ps.InducingWeightGuide(
        *(model, (size, size)),
        max_conditional_scale=max_conditional,
        max_inducing_scale=max_inducing,
    )


def in_weights(model: Any) -> ps.StructuredGuide:
    """Return FFG-W with the cap that the inducing weights have."""
    return ps.StructuredGuide(model, {"*": MeanField(MAX_INDUCING)})


def train(model: Any, guide: Any, images: Images, epochs: int, anneals: bool = True) -> None:
    steps = epochs * -(-len(images.x_train) // 250)
    ps.fit(
        *(model, guide, (images.x_train, images.y_train)),
        num_epochs=epochs,
        batch_size=250,
        kl_weight=ps.LinearAnnealing(-(-steps // 2)) if anneals else 1.0,
        progress=False,
    )


def score(model: Any, guide: Any, images: Images, draws: int) -> dict[str, float]:
    prediction = ps.predict(
        model, guide, images.x_test, num_samples=draws, batch_size=1000, stream=True
    )
    own = classification_scores(prediction.mean, images.y_test)
    return {
        "accuracy (%)": 100 * own.accuracy,
        "ECE (%)": 100 * own.calibration_error,
        "NLL (nats)": own.nll,
    }


def add(results: ResultsFile, part: str, row: str, seed: int, found: Mapping[str, float]) -> None:
    lines = ((TABLES[part], row, str(seed), key, f"{value:.6g}") for key, value in found.items())
    results.add(*lines)


# ---- the three parts -----------------------------------------------------------------------------


def ablation(images: Images, seed: int, options: Any, results: ResultsFile) -> None:
    """Train FFG-U with one option changed at a time."""
    runs: dict[str, Callable[[Any], ps.StructuredGuide]] = {
        **{f"M = {size}": lambda model, size=size: inducing(model, size) for size in SIZES},
        **{
            f"cap of the conditional noise {cap:g}": lambda model, cap=cap: inducing(
                model, max_conditional=cap
            )
            for cap in CAPS
        },
        **{
            f"cap of the scale of U {cap:g}": lambda model, cap=cap: inducing(
                model, max_inducing=cap
            )
            for cap in CAPS
        },
    }
    for row, make in runs.items():
        if not results.has(TABLES["ablation"], row, str(seed)):
            torch.manual_seed(seed)
            model = make_model(images, options)
            guide = make(model)
            train(model, guide, images, options.epochs)
            add(results, "ablation", row, seed, score(model, guide, images, options.draws))


def pruning(images: Images, seed: int, options: Any, results: ResultsFile) -> None:
    """Prune trained posteriors, fit them further for half as long, and score them."""
    for name, shares in SHARES_LEFT.items():
        rows = {share: f"{name}, {100 * share:g} % left" for share in shares}
        if all(results.has(TABLES["pruning"], row, str(seed)) for row in rows.values()):
            continue
        torch.manual_seed(seed)
        model = make_model(images, options)
        is_inducing = name == "FFG-U"
        guide = inducing(model) if is_inducing else in_weights(model)
        train(model, guide, images, options.epochs)
        weights = sum(value.numel() for value in ps.MAPGuide(model).parameters())
        for share, row in rows.items():
            own = copy.deepcopy(guide)
            prune = prune_inducing_factors if is_inducing else prune_mean_field
            left = prune(own, 1 - share).num_parameters
            train(model, own, images, -(-options.epochs // 2), anneals=False)
            found = {"parameters, share of the net's (%)": 100 * left / weights}
            if not results.has(TABLES["pruning"], row, str(seed)):
                found |= score(model, own, images, options.draws)
                add(results, "pruning", row, seed, found)


def cost(images: Images, seed: int, options: Any, results: ResultsFile) -> None:
    """Time predictions of a batch of 500 against as many deterministic nets."""
    makers: dict[str, Callable[[Any], ps.StructuredGuide]] = {
        "Deterministic": ps.MAPGuide,
        "FFG-W": in_weights,
        "FFG-U": inducing,
        "Ensemble-U": lambda model: ps.InducingWeightGuide(
            *(model, (SIZE, SIZE), "ensemble"), ensemble_size=5
        ),
    }
    x = images.x_test[:500]
    times: dict[str, dict[int, float]] = {}
    for row, make in makers.items():
        torch.manual_seed(seed)
        model = make_model(images, options)
        guide = make(model)
        times[row] = {count: seconds(model, guide, x, count) for count in COUNTS}
        plain = times["Deterministic"][1]
        found = {"parameters": float(sum(value.numel() for value in guide.parameters()))}
        for count, own in times[row].items():
            found[f"time, {count} draw{'s'[: count > 1]}"] = own / (count * plain)
        if row != "Deterministic" and not results.has(TABLES["cost"], row, str(seed)):
            add(results, "cost", row, seed, found)


def seconds(model: Any, guide: Any, x: Any, count: int, rounds: int = 5) -> float:
    """Return the shortest time of a prediction by so many draws."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        ps.predict(model, guide, x, num_samples=count)
        found.append(time.perf_counter() - start)
    return min(found)


PARTS = {"cost": cost, "ablation": ablation, "pruning": pruning}


if __name__ == "__main__":
    main()
