"""Time of a training step with several draws of the weights, one after another and in one pass.

    python docs/scripts/particles.py --particles 8

The last row of each net is an ensemble of as many members.
A round times both in turn; the table gives medians, and the median and quartiles of their ratio.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import pyro_structvi as ps

Loss = Callable[..., torch.Tensor]

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "20-50-10, batch 128": (
        lambda: nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10)),
        (128, 20),
    ),
    "784-400-400-10, batch 128": (
        lambda: nn.Sequential(
            nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
        ),
        (128, 784),
    ),
    "two convolutions, 32 images of 28 x 28": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 10)),
        ),
        (32, 1, 28, 28),
    ),
}

GUIDES: dict[str, Callable[[ps.Classifier], ps.StructuredGuide]] = {
    "mean field": lambda model: ps.MeanFieldGuide(model),
    "mean field, drawn": lambda model: ps.MeanFieldGuide(model, local_reparam=False),
    "k-tied, k = 2": lambda model: ps.KTiedGuide(model, join_bias=False),
    "inducing 64": lambda model: ps.InducingWeightGuide(model),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, ms a step")
    for title, (make_net, shape) in NETS.items():
        print(f"\n{title}\n{'guide':<20}{'loop':>9}{'together':>10}{'ratio':>8}{'quartiles':>14}")
        torch.manual_seed(0)
        x, y = torch.randn(shape), torch.randint(10, shape[:1])
        model = ps.Classifier(ps.bayesianize(make_net(), prior=0.3), num_data=60_000)
        cases = {
            name: draws(model, make(model), options.particles) for name, make in GUIDES.items()
        }
        cases["ensemble"] = members(model, options.particles)
        for name, losses in cases.items():
            report(name, [measure(losses, x, y) for _ in range(options.rounds + 2)][2:])


def draws(model: ps.Classifier, guide: ps.StructuredGuide, count: int) -> list[Loss]:
    return [
        ps.StructuredELBO(num_particles=count, vectorize_particles=together)(model, guide)
        for together in (False, True)
    ]


def members(model: ps.Classifier, count: int) -> list[Loss]:
    return [
        ps.StructuredELBO()(model, ps.EnsembleGuide(model, count, vectorize=together))
        for together in (False, True)
    ]


def measure(losses: list[Loss], x: torch.Tensor, y: torch.Tensor) -> list[float]:
    seconds = []
    for loss in losses:
        start = time.perf_counter()
        loss(x, y).backward()
        seconds.append(time.perf_counter() - start)
    return seconds


def report(name: str, seconds: list[list[float]]) -> None:
    loop, together = (1e3 * statistics.median(times) for times in zip(*seconds, strict=True))
    low, middle, high = statistics.quantiles([a / b for a, b in seconds], n=4)
    print(f"{name:<20}{loop:>9.1f}{together:>10.1f}{middle:>8.2f}{low:>8.2f}-{high:.2f}")


if __name__ == "__main__":
    main()
