"""The k-tied paper's signal-to-noise ratios of gradients, and its ELBOs in the course of training.

    python -m examples.papers.swiatkowski2020.gradient_snr --seeds 3 --output results.csv

Trained as the paper trains: weights are drawn (no local reparameterization), Adam at a constant rate,
and a weight of the KL that rises by 5e-5 a step. The paper picked rate and batch by validation from
sets that it states, and does not say what it picked for this table: its mean-field ELBO rises by about
0.4 nats for each weight in 1,000 steps, as much as log scales can move at a rate of 3e-4.

A ratio is ``E[g]^2 / Var[g]`` for each of the second layer's log scales, or log factors. The paper takes
moments over the last 10 batches of the training, and the mean over elements. Beside it stands the
median of ``diagnostics.gradient_snr``, over draws on one batch and at one point; "local" is that of
local reparameterization at the same parameters. In a product of two factors a log scale moves by the
sum of two steps of Adam; so the row of mean field with twice the rate for log scales says what that
alone does.

References:
    Swiatkowski et al. (2020), "The k-tied Normal distribution", section 3.2, figure 4 (right) and
    appendix A.2.
"""

import argparse
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER, paper_tables
from benchmarks.rows import ResultsFile
from examples.papers.swiatkowski2020.experiment import (
    POSTERIORS,
    Experiment,
    make_parser,
    parse,
    scores_of,
)
from examples.papers.swiatkowski2020.mlp import mnist_mlp
from pyro_structvi.diagnostics import gradient_snr

FASTER = "mean field, log scales at twice the rate"
BOUNDS = "Figure 4, right: -ELBO of validation images"
WINDOWS = "Figure 4, right: SNR of the second layer's log scales, last 10 batches, mean of elements"
MEDIANS = "SNR of the second layer's log scales, one batch, median of elements"
TABLES = (BOUNDS, WINDOWS, MEDIANS)
WINDOW = 10
LAYER = "dense2"


def main() -> None:
    rows = [*POSTERIORS, FASTER]
    parser = make_parser(__doc__, rows, steps=9000, batch_size=128, draws=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--kl-rise", type=float, default=5e-5, help="of the KL's weight, each step")
    parser.add_argument("--gradients", type=int, default=100, help="for a ratio")
    options = parse(parser)
    results = ResultsFile(options.output, HEADER)
    experiment = mnist_mlp(options)
    for seed in range(options.seeds):
        for name in options.posterior or rows:
            if not results.has(BOUNDS, name, str(seed)):
                found = sorted(measure(experiment, name, seed, options), key=place)
                results.add(*((*row[:2], str(seed), row[2], f"{row[3]:.5g}") for row in found))
    print(paper_tables(options.output) if options.output else "k-tied, ratios of gradients")


def place(row: tuple[str, ...]) -> int:
    """Return the place of a row's table."""
    return TABLES.index(row[0])


def measure(
    experiment: Experiment, name: str, seed: int, options: argparse.Namespace
) -> Iterator[tuple[str, str, str, float]]:
    """Train as the paper does, and measure at a ninth, five ninths and the end of the steps."""
    torch.manual_seed(seed)
    model = experiment.make_model(options.prior_scale)
    guide = experiment.make_guide(model, POSTERIORS.get(name), local_reparam=False)
    points = [round(options.steps * share / 9) for share in (1, 5, 9)]
    objective = ps.StructuredELBO(kl_weight=lambda step: min(1.0, options.kl_rise * step))
    optimizer = adam(guide, options.lr, 2 if name == FASTER else 1)
    scales = [value for key, value in guide.named_parameters() if is_measured(key)]
    window: deque[list[Tensor]] = deque(maxlen=WINDOW)
    for step, batch in zip(range(1, points[-1] + 1), batches(experiment, options), strict=False):
        optimizer.zero_grad()
        objective.differentiable_loss(model, guide, *batch).backward()
        window.append([value.grad.clone() for value in scales if value.grad is not None])
        optimizer.step()
        if step in points:
            column = f"step {step}"
            bound = scores_of(experiment, model, guide, experiment.validation, options.draws)
            yield BOUNDS, name, column, bound["-ELBO"]
            yield WINDOWS, name, column, window_ratio(window)
            weight = objective.current_kl_weight
            for row, ratio in medians(experiment, name, model, guide, weight, options).items():
                yield MEDIANS, row, column, ratio


def is_measured(key: str) -> bool:
    """Whether a parameter is a log scale or a log factor of the layer's weight."""
    return f"{LAYER}/weight" in key and "scale" in key


def adam(guide: ps.StructuredGuide, lr: float, factor: float) -> torch.optim.Adam:
    """Return Adam, with the rate of mean field's log scales multiplied by a factor."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for key, value in guide.named_parameters():
        groups[key.endswith(".log_scale")].append(value)
    scales = {"params": groups[True], "lr": factor * lr}
    return torch.optim.Adam([scales, {"params": groups[False]}], lr=lr, fused=True)


def batches(experiment: Experiment, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, in a new order in each epoch."""
    x, y = experiment.train
    while True:
        for chosen in torch.randperm(len(x), device=x.device).split(options.batch_size):
            yield x[chosen], y[chosen]


def window_ratio(window: Iterable[list[Tensor]]) -> float:
    """Return the mean ratio of the elements whose gradients vary, over parameters of one size."""
    ratios = []
    for gradients in zip(*window, strict=True):
        variance, mean = torch.var_mean(torch.stack(gradients).double(), 0)
        ratios.append((mean.square() / variance)[variance > 0])
    return float(torch.cat(ratios).mean())


def medians(
    experiment: Experiment,
    name: str,
    model: Any,
    guide: ps.StructuredGuide,
    kl_weight: float,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return the ratio on one batch, with weights drawn as in the training and with local draws."""
    x, y = (part[: options.batch_size] for part in experiment.train)
    local = experiment.make_guide(model, POSTERIORS.get(name), local_reparam=True)
    local.initialize(x, y)
    local.load_state_dict(guide.state_dict())
    objective = ps.StructuredELBO(kl_weight=kl_weight)
    found = {}
    for row, each in ((name, guide), (f"{name}, local", local)):
        noise = gradient_snr(
            *(model, each, x, y), num_samples=options.gradients, objective=objective
        )
        ratios = [own.median_snr for key, own in noise.items() if is_measured(key)]
        found[row] = sum(ratios) / len(ratios)
    return found


if __name__ == "__main__":
    main()
