"""Cost of a training step beside the same net without a posterior, in one interleaved run.

    make bench                                # every net and guide, ratios to the deterministic step
    make bench BENCH="--net wide --rounds 30"

A round times one step of every method in turn, so that a busy machine slows all alike. The table
gives the median over rounds of the ratio to the deterministic step of the same round, and its
quartiles. ``make`` also tells glibc to keep freed memory: getting large tensors from the system page by
page would be a good part of some steps, and is no part of the work.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

import pyro_structvi as ps
from pyro_structvi.nn import PointEstimateWarning


def make_mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, out in pairwise(widths):
        layers += [nn.Linear(size, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_resnet18() -> nn.Module:
    net = resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # for images of 32 x 32
    net.maxpool = nn.Identity()  # type: ignore[assignment]
    return net


NETS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": ("MLP 20-50-10, batch 128", lambda: make_mlp(20, 50, 10), (128, 20)),
    "mnist": ("MLP 784-400-400-10, batch 128", lambda: make_mlp(784, 400, 400, 10), (128, 784)),
    "wide": (
        "MLP 1024-2048-2048-10, batch 512",
        lambda: make_mlp(1024, 2048, 2048, 10),
        (512, 1024),
    ),
    "huge": (
        "MLP 4096-4096-4096-10, batch 512",
        lambda: make_mlp(4096, 4096, 4096, 10),
        (512, 4096),
    ),
    "resnet18": ("ResNet-18 (CIFAR stem), batch 32", make_resnet18, (32, 3, 32, 32)),
}

GUIDES: dict[str, Callable[[ps.Classifier], ps.StructuredGuide]] = {
    "MAP": lambda model: ps.MAPGuide(model),
    "ensemble of 5": lambda model: ps.EnsembleGuide(model, size=5),
    "MC dropout": lambda model: ps.MCDropoutGuide(model),
    "mean field, drawn": lambda model: ps.MeanFieldGuide(model, local_reparam=False),
    "mean field": lambda model: ps.MeanFieldGuide(model),
    "mean field, flipout": lambda model: ps.MeanFieldGuide(model, local_reparam="flipout"),
    "k-tied, k = 1": lambda model: ps.KTiedGuide(model, rank=1),
    "k-tied, k = 2": lambda model: ps.KTiedGuide(model, rank=2),
    "matrix normal": lambda model: ps.MatrixNormalGuide(model),
    "rowwise": lambda model: ps.RowwiseGuide(model),
    "low rank, K = 1": lambda model: ps.AutoLowRankLRT(model, rank=1),
    "low rank, K = 2": lambda model: ps.AutoLowRankLRT(model, rank=2),
    "low rank, K = 5": lambda model: ps.AutoLowRankLRT(model, rank=5),
    "inducing 64": lambda model: ps.InducingWeightGuide(model),
    "inducing 64, drawn": lambda model: ps.InducingWeightGuide(model, local_reparam=False),
    "full covariance": lambda model: ps.FullCovarianceGuide(model),
    "Walsh-Hadamard": lambda model: ps.MeanFieldGuide(model),
    "Walsh-Hadamard, full": lambda model: ps.FullCovarianceGuide(model),
    "rank-1": lambda model: ps.MeanFieldGuide(model),
}

LAYERS: dict[str, Any] = {
    "Walsh-Hadamard": ps.WalshHadamard(),
    "Walsh-Hadamard, full": ps.WalshHadamard(),
    "rank-1": ps.RankOne(),
}

ONLY = {
    "ensemble of 5": {"small", "mnist", "wide", "huge"},  # batch norms cannot be vectorized
    "mean field, flipout": {"resnet18"},  # for dense layers it is the local rule
    "rowwise": {"small"},
    "full covariance": {"small"},
    "Walsh-Hadamard, full": {"small", "mnist", "wide"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append", help="default: every net")
    parser.add_argument("--guide", choices=GUIDES, action="append", help="default: every guide")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"`--rounds` must be at least 2, for quartiles, but got {options.rounds}.")
    warnings.simplefilter("ignore", PointEstimateWarning)  # of batch norms
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    print(f"torch {torch.__version__}, {device.type}, {kind}")
    for name in options.net or NETS:
        description, make_net, shape = NETS[name]
        torch.manual_seed(0)
        x = torch.randn(shape, device=device)
        y = torch.randint(10, shape[:1], device=device)
        steps = {"deterministic": deterministic_step(make_net().to(device), x, y)}
        for title in options.guide or GUIDES:
            if name in ONLY.get(title, NETS):
                steps[title] = guide_step(make_net().to(device), title, x, y)
        report(description, measure(steps, options.rounds))


def deterministic_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def guide_step(net: nn.Module, title: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    layers = {"*": LAYERS[title]} if title in LAYERS else None
    model = ps.Classifier(ps.bayesianize(net, prior=0.3, layers=layers), num_data=60_000)
    guide = GUIDES[title](model)
    loss = ps.StructuredELBO()(model, guide)
    loss(x, y)  # the run that counts uses
    parameters = [*guide.parameters(), *model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {title: [] for title in steps}
    for number in range(rounds + 2):
        for title, step in steps.items():
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 2:  # the first rounds warm up
                seconds[title].append(time.perf_counter() - start)
    return seconds


def report(title: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{title}\n{'step':<20}{'ms':>9}{'ratio':>8}{'quartiles':>14}")
    base = seconds["deterministic"]
    for name, times in seconds.items():
        ratios = [own / other for own, other in zip(times, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1e3 * statistics.median(times)
        print(f"{name:<20}{milliseconds:>9.2f}{middle:>8.2f}{low:>8.2f}-{high:.2f}")


if __name__ == "__main__":
    main()
