"""Cost of one linear layer under each algorithm of Tomczak et al. (2020), Table 1, stated and measured.

    python docs/scripts/layer_cost.py
    python docs/scripts/layer_cost.py --sizes 24x24 400x400 --batch 128 --rounds 30

Time is that of a forward pass, a KL (for MAP, the penalty of the weights) and the gradients, as a
ratio to MAP: as the table's formula states it, and the median over rounds of the measured one. A
round times every algorithm in turn, so that a busy machine slows all alike.

Memory is what a forward pass leaves for the gradients, in numbers for each example and output: the
outputs, and what autograd saves, without parameters and without the layer's input, which the layer
before keeps. It is the difference between a batch and half of it: tensors of the size of the weight do
not grow with the batch, and are no part of the paper's formulas.

Naive algorithms draw a weight for each example. The naive low rank and the full rank use dense
covariances over all D = in * out weights; they, and draws for each example, are left out where that
takes too much memory or time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from pyro_structvi.distributions import LowRankNormal, MeanFieldNormal

LARGEST_DENSE = 1024  # weights D whose D x D covariance is formed
LARGEST_DRAW = 50_000_000  # numbers in a draw of a weight for each example
PRIOR_SCALE = 0.3


class Algorithm(NamedTuple):
    """A row of the table.

    Attributes:
        time: The paper's formula, evaluated.
        memory: The paper's formula over |B| out, evaluated.
        text: Both formulas, with N = in * out.
        parameters: What is learned.
        step: Gives the outputs and the KL.
    """

    time: float
    memory: float
    text: tuple[str, str]
    parameters: list[Tensor]
    step: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["24x24", "400x400", "1024x1024"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 5], help="of low rank")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {options.batch}")
    for text in options.sizes:
        inputs, out = map(int, text.split("x"))
        torch.manual_seed(0)
        x = torch.randn(options.batch, inputs, requires_grad=True)
        algorithms = make_algorithms(inputs, out, options.batch, options.ranks)
        report(inputs, out, algorithms, measure(algorithms, x, options.rounds), x)


# ---- the algorithms ------------------------------------------------------------------------------


def make_algorithms(inputs: int, out: int, batch: int, ranks: list[int]) -> dict[str, Algorithm]:
    size = inputs * out
    base = size * batch
    rows = {
        "MAP": Algorithm(base, 1, ("NB", "1"), *maximum_a_posteriori(inputs, out)),
        "mean field, LRT": Algorithm(2 * base, 2, ("2 NB", "2"), *mean_field(inputs, out)),
    }
    if base <= LARGEST_DRAW:
        naive = mean_field(inputs, out, draw=True)
        rows["mean field, naive"] = Algorithm(base, inputs, ("NB", "in"), *naive)
    for rank in ranks:
        cost, texts = rank**3 + (rank + 2) * base, ("K^3 + (K+2) NB", "K + 2")
        rows[f"low rank, efficient, K = {rank}"] = Algorithm(
            cost, rank + 2, texts, *low_rank(inputs, out, rank)
        )
    if size <= LARGEST_DENSE:
        for rank in ranks:
            texts = ("N^3 + NB", "in")
            rows[f"low rank, naive, K = {rank}"] = Algorithm(
                size**3 + base, inputs, texts, *low_rank(inputs, out, rank, draw=True)
            )
        texts = ("N^3 + N^2 B", "in")
        rows["full rank"] = Algorithm(
            size**3 + size**2 * batch, inputs, texts, *full_rank(inputs, out)
        )
    return rows


Ways = tuple[list[Tensor], Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]]


def leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


def make_prior(inputs: int, out: int) -> Independent:
    return Independent(Normal(torch.zeros(out, inputs), PRIOR_SCALE), 2)


def maximum_a_posteriori(inputs: int, out: int) -> Ways:
    weight = leaf(torch.randn(out, inputs))
    return [weight], lambda x: (
        F.linear(x, weight),
        lambda: weight.square().sum() / (2 * PRIOR_SCALE**2),
    )


def apply_draws(weights: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(weights, x.unsqueeze(-1)).squeeze(-1)


def mean_field(inputs: int, out: int, draw: bool = False) -> Ways:
    loc, log_scale = leaf(torch.randn(out, inputs)), leaf(torch.full((out, inputs), -4.0))
    prior = make_prior(inputs, out)

    def step(x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        q = MeanFieldNormal(loc, log_scale.exp(), validate_args=False)
        outputs = apply_draws(q.rsample((len(x),)), x) if draw else q.image(x).rsample()
        return outputs, lambda: kl_divergence(q, prior)

    return [loc, log_scale], step


def low_rank(inputs: int, out: int, rank: int, draw: bool = False) -> Ways:
    """With the constant diagonal of ELRG-VI; the naive way has a dense KL."""
    loc, factors = leaf(torch.randn(out, inputs)), leaf(0.02 * torch.randn(rank, out, inputs))
    scale, prior = torch.tensor(0.02), make_prior(inputs, out)

    def step(x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        q = LowRankNormal(loc, factors, scale, validate_args=False)
        if draw:
            return apply_draws(q.rsample((len(x),)), x), lambda: dense_kl(q)
        return q.image(x).rsample(), lambda: kl_divergence(q, prior)

    return [loc, factors], step


def dense_kl(q: LowRankNormal) -> Tensor:
    covariance, size = q.covariance_matrix, q.loc.numel()
    moment = (covariance.diagonal().sum() + q.loc.square().sum()) / PRIOR_SCALE**2
    log_det_prior = 2 * size * torch.tensor(PRIOR_SCALE).log()
    return (moment - size + log_det_prior - torch.linalg.slogdet(covariance).logabsdet) / 2


def full_rank(inputs: int, out: int) -> Ways:
    """A multivariate normal over the row-major weight, by torch."""
    size = inputs * out
    loc, tril = leaf(torch.randn(size)), leaf(0.02 * torch.eye(size))
    prior = MultivariateNormal(torch.zeros(size), scale_tril=PRIOR_SCALE * torch.eye(size))

    def step(x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        q = MultivariateNormal(loc, scale_tril=tril, validate_args=False)
        weights = q.rsample((len(x),)).unflatten(-1, (out, inputs))
        return apply_draws(weights, x), lambda: kl_divergence(q, prior)

    return [loc, tril], step


# ---- measuring -----------------------------------------------------------------------------------


def measure(
    algorithms: dict[str, Algorithm], x: Tensor, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the ratio of each algorithm's time to that of MAP, and the milliseconds."""
    seconds: dict[str, list[float]] = {title: [] for title in algorithms}
    for number in range(rounds + 2):
        for title, algorithm in algorithms.items():
            start = time.perf_counter()
            outputs, kl = algorithm.step(x)
            torch.autograd.grad(outputs.square().sum() + kl(), [*algorithm.parameters, x])
            if number >= 2:  # the first rounds warm up
                seconds[title].append(time.perf_counter() - start)
    return {
        title: (
            statistics.median(a / b for a, b in zip(times, seconds["MAP"], strict=True)),
            1e3 * statistics.median(times),
        )
        for title, times in seconds.items()
    }


def numbers_for_each_output(algorithm: Algorithm, x: Tensor) -> float:
    """Return the numbers that a further example leaves, for each of its outputs."""
    half = x[: len(x) // 2].detach().requires_grad_()
    outputs, _ = algorithm.step(half)
    kept = numbers_kept(algorithm, x) - numbers_kept(algorithm, half)
    return kept / ((len(x) - len(half)) * outputs.shape[-1])


def numbers_kept(algorithm: Algorithm, x: Tensor) -> int:
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs, _ = algorithm.step(x)
    pack(outputs)
    known = {tensor.untyped_storage().data_ptr() for tensor in [*algorithm.parameters, x]}
    kept = sum(storages[address].nbytes() for address in storages.keys() - known)
    return kept // outputs.element_size()


def report(
    inputs: int,
    out: int,
    algorithms: dict[str, Algorithm],
    times: dict[str, tuple[float, float]],
    x: Tensor,
) -> None:
    print(f"\n{inputs} inputs, {out} outputs; N = {inputs * out} weights")
    print(f"{'':<28}{'time / MAP':^33}{'':>9}{'memory / (B out)':^24}")
    print(f"{'algorithm':<28}{'stated':>15}{'':>9}{'measured':>9}{'ms':>9}", end="")
    print(f"{'stated':>7}{'':>8}{'measured':>9}")
    for title, row in algorithms.items():
        ratio, milliseconds = times[title]
        stated = row.time / algorithms["MAP"].time
        print(
            f"{title:<28}{row.text[0]:>15}{stated:>9.4g}{ratio:>9.3g}{milliseconds:>9.2f}"
            f"{row.text[1]:>7}{row.memory:>8.4g}{numbers_for_each_output(row, x):>9.4g}"
        )


if __name__ == "__main__":
    main()
