"""What each gradient that is written by hand saves of a training step.

    OMP_NUM_THREADS=1 python docs/scripts/gradients_by_hand.py --net small --net wide --net resnet18

For each function with a gradient by hand, and a guide whose step calls it, the step with torch's own
operations in its place over the step as it is, in interleaved rounds of one run: median and quartiles of
the ratios round by round. 1.03 says that the gradient by hand saves 3 % of a step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.measure import describe_machine, quartiles, synchronize
from benchmarks.methods import METHODS
from benchmarks.nets import NETS
from pyro_structvi.linalg.factorizations import stable_cholesky
from pyro_structvi.linalg.matrices import identity_like


def plain_row_gram(factors: Tensor, batch_dim: int) -> Tensor:
    flat = factors.flatten(batch_dim + 1)
    return (flat @ flat.mT).double()


def plain_sum_of_logs(rows: Tensor, columns: Tensor) -> Tensor:
    return (rows @ columns.mT).log().sum((-2, -1))


class PlainRows:
    @staticmethod
    def apply(factor: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        double, square = factor.double(), diagonal.double().square()
        tril, jitter = stable_cholesky(double @ double.mT + torch.diag_embed(square))
        inverse = torch.linalg.solve_triangular(tril, identity_like(tril), upper=False)
        remainder = inverse * (square + jitter.unsqueeze(-1)).sqrt().unsqueeze(-2)
        return (inverse @ double).to(factor.dtype), remainder.to(factor.dtype), jitter


# By name: torch's own operations for a function, and guides whose step calls it.
PLAIN: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "sum_of_logs": (plain_sum_of_logs, ["k-tied, k = 2"]),
    "row_gram": (plain_row_gram, ["low rank, K = 2"]),
    "OrthonormalRows": (PlainRows, ["inducing 64"]),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Put torch's own operations in the place of a function in this block."""
    modules = [module for key, module in sys.modules.items() if key.startswith("pyro_structvi.")]
    patches = [
        mock.patch.object(module, name, PLAIN[name][0])
        for module in modules
        if hasattr(module, name)
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append")
    parser.add_argument("--function", choices=PLAIN, action="append")
    parser.add_argument("--rounds", type=int, help="rounds of a pair of steps; by the net's size")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    print(f"\n{'function':24} {'guide':18} {'net':10} without / with")
    for net_name in options.net or ["small", "mnist", "wide", "resnet18"]:
        net = NETS[net_name]
        for name in options.function or PLAIN:
            for guide in PLAIN[name][1]:
                torch.manual_seed(0)
                x, y = net.make_batch(device)
                step = METHODS[guide](net.make().to(device), x, y).step
                rounds = options.rounds or 4 * net.rounds
                ratios = compare(step, name, rounds)
                low, median, high = quartiles(ratios)
                print(f"{name:24} {guide:18} {net_name:10} {median:.3f} ({low:.3f} to {high:.3f})")


def compare(step: Callable[[], Any], name: str, rounds: int) -> list[float]:
    """Return the times without over the times with the gradient by hand, round by round."""
    ratios = []
    repeats = max(1, round(0.05 / seconds(step, 2)))
    for number in tqdm(range(rounds), leave=False):
        order = [True, False] if number % 2 else [False, True]
        taken = {}
        for by_hand in order:
            if by_hand:
                taken[True] = seconds(step, repeats)
            else:
                with without(name):
                    taken[False] = seconds(step, repeats)
        ratios.append(taken[False] / taken[True])
    return ratios


def seconds(step: Callable[[], Any], repeats: int) -> float:
    """Return the time of a step, the median of a few."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
