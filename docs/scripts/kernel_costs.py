"""What the kernels cost that a step was made around: thin products, thin convolutions, noise.

    OMP_NUM_THREADS=1 python docs/scripts/kernel_costs.py

Milliseconds, medians over rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.maps import ConvolutionMap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--stages", type=int, default=4, help="of a ResNet-18, to be timed")
    options = parser.parse_args()
    size = options.size
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, single precision")
    large, thin = torch.rand(size, size), torch.rand(size, 2)
    tasks: dict[str, Callable[[], object]] = {
        f"large.T @ thin, {size} x {size} by {size} x 2": lambda: large.mT @ thin,
        "(thin.T @ large).T": lambda: (thin.mT.contiguous() @ large).mT,
        "normal_, a million numbers": lambda: torch.empty(1_000_000).normal_(),
        "the same by NumPy's SFC64": lambda: SFC64.standard_normal(1_000_000, np.float32),
    }
    for channels, pixels in ((64, 32), (128, 16), (256, 8), (512, 4))[: options.stages]:
        tasks |= convolutions(channels, pixels)
    for title, task in tasks.items():
        print(f"{title:<72}{1e3 * median_time(task, options.rounds):>8.2f}")


SFC64 = np.random.Generator(np.random.SFC64(0))


def convolutions(channels: int, pixels: int) -> dict[str, Callable[[], object]]:
    """Return ways to convolve 32 images with filters of 3 x 3, one stage of a ResNet-18 for CIFAR."""
    images = torch.rand(32, channels, pixels, pixels, requires_grad=True)
    last = images.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    many, few, one = (torch.rand(out, channels * 9, requires_grad=True) for out in (channels, 3, 1))
    hidden = torch.rand(32, 3, pixels, pixels, requires_grad=True)
    mixing = torch.rand(channels, 3, requires_grad=True)
    linear_map = ConvolutionMap(F.conv2d, (channels, 3, 3), padding=1)
    point_map = ConvolutionMap(F.conv2d, (3, 1, 1))
    size = f"{channels} channels, {pixels} x {pixels}"
    with_gradients = {
        "convolution": (linear_map, images, many),
        "the same, channels-last": (linear_map, last, many),
        "to 3 channels (k-tied, k = 2) by convolution": (linear_map, images, few),
        "to 3 channels (k-tied, k = 2) by products and shifts": (linear_map.bank, images, few),
        "to 1 channel by convolution": (linear_map, images, one),
        "to 1 channel by products and shifts": (linear_map.bank, images, one),
        "from 3 hidden channels by convolution": (point_map, hidden, mixing),
        "from 3 hidden channels by products": (linear_map.mix, hidden, mixing),
    }
    tasks: dict[str, Callable[[], object]] = {
        f"{size}: {name}": partial(train, *each) for name, each in with_gradients.items()
    }
    tasks[f"{size}: convolution, forward"] = partial(forward, linear_map, images, many)
    tasks[f"{size}: unfolded patches, forward"] = partial(forward, unfolded, images, many)
    return tasks


def unfolded(images: Tensor, filters: Tensor) -> Tensor:
    return filters @ F.unfold(images, 3, padding=1)


@torch.no_grad()
def forward(
    convolve: Callable[[Tensor, Tensor], Tensor], images: Tensor, filters: Tensor
) -> Tensor:
    return convolve(images, filters)


def train(
    convolve: Callable[[Tensor, Tensor], Tensor], images: Tensor, filters: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of a convolution."""
    outputs = convolve(images, filters)
    return torch.autograd.grad(outputs, (images, filters), torch.ones_like(outputs))


def median_time(task: Callable[[], object], rounds: int) -> float:
    task()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        task()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
