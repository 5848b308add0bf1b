"""Peak memory of training a ResNet-50 with each guide, beside the estimate and the plain net.

    python docs/scripts/memory.py                      # every guide, one process each
    python docs/scripts/memory.py --net resnet18 --guide "k-tied, k = 2"

Each guide trains for some steps in a process of its own. *Estimate* is what ``estimate_memory`` says of
parameters, gradients and Adam's moments; *measured* is the largest memory of the process in the steps,
less that of the process with the model before the guide was made. The difference is activations, and
what a step forms. The plain net's row has its parameters four times, and the same measure.
"""

import argparse
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import pyro_structvi as ps
from pyro_structvi.nn import PointEstimateWarning

GUIDES: dict[str, Callable[[Any], ps.StructuredGuide]] = {
    "MAP": lambda model: ps.MAPGuide(model),
    "mean field": lambda model: ps.MeanFieldGuide(model),
    "mean field, drawn": lambda model: ps.MeanFieldGuide(model, local_reparam=False),
    "k-tied, k = 2": lambda model: ps.KTiedGuide(model, rank=2, join_bias=False),
    "low rank, K = 2": lambda model: ps.AutoLowRankLRT(
        model, rank=2, diagonal="constant", join_bias=False
    ),
    "inducing 64": lambda model: ps.InducingWeightGuide(model),
    "MC dropout": lambda model: ps.MCDropoutGuide(model),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=["resnet18", "resnet50"], default="resnet50")
    parser.add_argument("--guide", choices=["plain", *GUIDES], action="append")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    print(f"torch {torch.__version__}, {options.net}, batch {options.batch_size}, in MiB")
    print(f"{'guide':<20}{'parameters':>12}{'estimate':>10}{'measured':>10}{'beyond':>9}")
    for title in options.guide or ["plain", *GUIDES]:
        own = [sys.executable, __file__, "--measure", title, "--net", options.net]
        own += ["--batch-size", str(options.batch_size), "--steps", str(options.steps)]
        print(subprocess.run(own, check=True, capture_output=True, text=True).stdout, end="")


def measure(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore", PointEstimateWarning)  # of batch norms
    torch.manual_seed(0)
    net = getattr(models, options.net)(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # for images of 32 x 32
    net.maxpool = nn.Identity()
    x, y = torch.randn(options.batch_size, 3, 32, 32), torch.randint(10, (options.batch_size,))
    if options.measure == "plain":
        before, parameters = peak(), list(net.parameters())
        estimate = 4 * sum(value.numel() * value.element_size() for value in parameters)
        # The net's own parameters were there before.
        train(parameters, lambda: F.cross_entropy(net(x), y), options.steps)
        report(options.measure, parameters, estimate, peak() - before + estimate / 4 / 2**20)
        return
    model = ps.Classifier(ps.bayesianize(net, prior=0.1), num_data=50_000)
    make_guide = GUIDES[options.measure]
    estimate = ps.estimate_memory(make_guide, model).training_bytes
    before = peak()
    guide = make_guide(model)
    loss = ps.StructuredELBO()(model, guide)
    parameters = list(guide.parameters())
    train(parameters, lambda: loss(x, y), options.steps)
    report(options.measure, parameters, estimate, peak() - before)


def train(parameters: list[nn.Parameter], loss: Callable[[], torch.Tensor], steps: int) -> None:
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def report(title: str, parameters: list[nn.Parameter], estimate: float, measured: float) -> None:
    count = sum(value.numel() for value in parameters)
    estimate /= 2**20
    print(f"{title:<20}{count:>12,}{estimate:>10.0f}{measured:>10.0f}{measured - estimate:>9.0f}")


def peak() -> float:
    """Return the largest memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
