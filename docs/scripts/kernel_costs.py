"""What the kernels cost that a step was made around: thin products, thin convolutions, noise.

    OMP_NUM_THREADS=1 python docs/scripts/kernel_costs.py

Milliseconds, medians over rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2048)
    options = parser.parse_args()
    size = options.size
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, single precision")
    large, thin = torch.rand(size, size), torch.rand(size, 2)
    images = torch.rand(32, 64, 32, 32, requires_grad=True)
    few, many = (torch.rand(out, 64, 3, 3, requires_grad=True) for out in (3, 64))
    tasks: dict[str, Callable[[], object]] = {
        f"large.T @ thin, {size} x {size} by {size} x 2": lambda: large.mT @ thin,
        "(thin.T @ large).T": lambda: (thin.mT.contiguous() @ large).mT,
        "convolution of 32 x 64 x 32 x 32 to 64 channels, and gradients": lambda: train(
            images, many
        ),
        "the same to 3 channels": lambda: train(images, few),
        "normal_, a million numbers": lambda: torch.empty(1_000_000).normal_(),
    }
    for title, task in tasks.items():
        print(f"{title:<64}{1e3 * median_time(task, options.rounds):>8.2f}")


def train(images: Tensor, filters: Tensor) -> tuple[Tensor, ...]:
    outputs = F.conv2d(images, filters, padding=1)
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
