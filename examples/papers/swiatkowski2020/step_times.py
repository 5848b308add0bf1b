"""The k-tied paper's table of step times: mean field and k-tied beside the deterministic step.

    python -m examples.papers.swiatkowski2020.step_times --output results.csv

The paper's net is that of a tutorial, 784-128-10 in batches of 32. Times are taken in rounds, one
after the other, with the steps of ``benchmarks/bench.py``: weights drawn as in the paper, local
reparameterization, and that traced as ``fit`` does it with its own optimizer. They are seconds of CPU
on one thread, so that other work counts little; a ratio divides two of the same round. For the net of
400 units and for others, see the page on benchmarks.

References:
    Swiatkowski et al. (2020), "The k-tied Normal distribution", table 4.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyro_structvi as ps
from benchmarks.measure import quartiles
from benchmarks.methods import make_deterministic, step_eagerly, step_traced
from benchmarks.paper_tables import HEADER, paper_tables
from benchmarks.rows import ResultsFile
from examples.papers.swiatkowski2020.experiment import Rows

BASE = "point estimate"
GUIDES: dict[str, Callable[..., ps.StructuredGuide]] = {
    "mean field": ps.MeanFieldGuide,
    "k-tied, k = 2": partial(ps.KTiedGuide, join_bias=False),
}
FIRST = 5
WAYS = {
    "drawn": (False, step_eagerly),
    "local": (True, step_eagerly),
    "traced": (True, step_traced),
}
TABLE = "Table 4: time of a training step, 784-128-10 in batches of 32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = ResultsFile(options.output, HEADER)
    if not results.has(TABLE):
        results.add(*((*row[:2], "0", row[2], f"{row[3]:.4g}") for row in measure(options.rounds)))
    print(paper_tables(options.output) if options.output else "k-tied, times of steps")


def measure(rounds: int) -> Rows:
    """Return milliseconds and the ratio to the deterministic step, with its quartiles."""
    x, y = torch.rand(32, 784), torch.randint(10, (32,))

    def make_net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    steps = {BASE: make_deterministic(make_net(), x, y).step}
    for name, make_guide in GUIDES.items():
        for way, (is_local, make_step) in WAYS.items():
            model = ps.Classifier(ps.bayesianize(make_net(), prior=0.2), num_data=60_000)
            guide = make_guide(model, local_reparam=is_local)
            steps[f"{name}, {way}"] = make_step(model, guide, x, y)
    seconds = cpu_seconds(steps, rounds)
    rows: Rows = []
    for name, own in seconds.items():
        ratio = [each / base for each, base in zip(own, seconds[BASE], strict=True)]
        low, middle, high = quartiles(ratio)
        found = {
            "ms": 1000 * quartiles(own)[1],
            "ratio": middle,
            "lower quartile": low,
            "upper quartile": high,
        }
        rows += [(TABLE, name, *each) for each in found.items()]
    return rows


def cpu_seconds(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, without the first rounds, which trace."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + FIRST):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return {name: own[FIRST:] for name, own in seconds.items()}


if __name__ == "__main__":
    main()
