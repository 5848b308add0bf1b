"""Active learning on tables: labels chosen by the variance of the function, and at random.

    python -m benchmarks.active_learning --data energy.npz --data concrete.npz --output FILE.csv
    python -m benchmarks.active_learning --data energy.npz --method "matrix normal" --quick

A file has ``x`` and ``y``, and splits in ``train_idx`` and ``test_idx``; trial t has split t. The first
20 labels are random. In each round a net is fitted to all labels, and 10 more are chosen among the other
rows for training: at random, or by the variance of the net's function under the posterior. These are
drawn without replacement, with probabilities in proportion to the variance, since the rows of largest
variance are alike (Kirsch et al., 2023). Nets have one hidden layer of 50 tanh units, the prior
``FanIn(2.0)`` and learned noise. What the file of results has is not measured again.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.active_table import ACTIVE, active_table
from benchmarks.rows import ResultsFile

START, BATCH = 20, 10
CHOICES = ("random", "variance")
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "global inducing": (ps.GlobalInducingGuide, {}),
    "matrix normal": (ps.MatrixNormalGuide, {}),
    "mean field": (ps.MeanFieldGuide, {}),
    "ensemble of 5": (ps.EnsembleGuide, {"kl_weight": 1.0}),
}
Data = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="an .npz file")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--labels", type=int, default=200, help="at the end")
    parser.add_argument("--steps", type=int, default=1000, help="of each fit")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two rounds and a few steps")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    if options.quick:
        options.labels, options.steps = START + BATCH, 20
    torch.set_num_threads(1)
    results = ResultsFile(options.output, ACTIVE)
    runs = product(range(options.trials), options.data, options.method or METHODS, CHOICES)
    for trial, path, method, choice in runs:
        key = path.stem, method, choice, str(trial)
        if not results.has(*key):
            train, test = load(path, trial)
            found = learn(train, test, method, choice, trial, options)
            results.add(*((*key, str(count), f"{error:.5g}") for count, error in found))
    print(active_table(results.rows))


def load(path: Path, trial: int) -> tuple[Data, Data]:
    """Return the rows for training and for the test, in their own units."""
    with np.load(path) as file:
        x, y = (torch.tensor(file[name]).float() for name in ("x", "y"))
        parts = [torch.tensor(file[name][trial]).long() for name in ("train_idx", "test_idx")]
    y = y.reshape(len(x), 1)
    return (x[parts[0]], y[parts[0]]), (x[parts[1]], y[parts[1]])


def learn(
    train: Data, test: Data, method: str, choice: str, trial: int, options: Any
) -> Iterator[tuple[int, float]]:
    """Yield the number of labels and the root mean squared error of the test, round by round."""
    torch.manual_seed(trial)  # the same first labels for all methods
    is_labelled = torch.zeros(len(train[0]), dtype=torch.bool)
    is_labelled[torch.randperm(len(train[0]))[:START]] = True
    make_guide, arguments = METHODS[method]
    while True:
        data = tuple(part[is_labelled] for part in train)
        net = nn.Sequential(nn.Linear(train[0].shape[1], 50), nn.Tanh(), nn.Linear(50, 1))
        net = ps.bayesianize(net, prior=ps.FanIn(2.0))
        model = ps.Regressor(net, noise="learned", standardize=data)
        guide = make_guide(model)
        arguments = {"num_steps": options.steps, "compiled": "traced", **arguments}
        ps.fit(model, guide, data, progress=False, **arguments)
        error = ps.predict(model, guide, test[0], num_samples=200).mean - test[1]
        yield int(is_labelled.sum()), float(error.square().mean().sqrt())
        if is_labelled.sum() >= options.labels:
            return
        pool = (~is_labelled).nonzero().squeeze(-1)
        weights = torch.ones(len(pool))
        if choice == "variance":
            found = ps.predict(model, guide, train[0][pool], num_samples=200)
            weights = found.function_variance.squeeze(-1)
        is_labelled[pool[torch.multinomial(weights, BATCH)]] = True


if __name__ == "__main__":
    main()
