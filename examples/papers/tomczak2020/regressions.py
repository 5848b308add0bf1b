"""UCI regressions with the posteriors of Tomczak, Swaroop and Turner (2020).

    python -m examples.papers.tomczak2020.regressions --data boston.npz --data energy.npz \
        --output examples/papers/tomczak2020/results.csv
    python -m examples.papers.tomczak2020.regressions --data energy.npz --smoke

Files, splits, net, prior and noise are those of ``benchmarks/uci.py``: one hidden layer of 50 ReLU
units, learned scales of the prior, heteroscedastic noise, and the defaults of ``fit``. A split counts
as a seed. What the file of results has is not measured again.
"""

import argparse
import math
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from benchmarks.uci import LARGEST_BATCH, Split, make_model, splits
from examples.papers.tomczak2020.posteriors import GUIDES, expected_bound

PASSES = 100  # over the data, for the bound: small data need many draws
LEFT_OUT = ("MAP", "mean field, drawn weights", "ELRG, K = 0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="an .npz file")
    parser.add_argument("--guide", choices=GUIDES, action="append", help="default: all but three")
    parser.add_argument("--splits", type=int, default=3, help="how many of them")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=500, help="of each posterior")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    if options.smoke:
        options.splits, options.steps, options.draws = 1, 20, 10
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    names = options.guide or [name for name in GUIDES if name not in LEFT_OUT]
    for path in options.data:
        for split in islice(splits(path, gaps=False), options.splits):
            for name in names:
                key = (f"UCI, {path.stem}", name, split.name)
                if not results.has(*key):
                    scores = measure(split, name, options)
                    results.add(*((*key, *score) for score in scores.items()))


def measure(split: Split, name: str, options: Any) -> dict[str, str]:
    """Return densities and errors in the targets' own units, the ELBO in standardized ones."""
    torch.manual_seed(0)
    model = make_model(split, "heteroscedastic", 50)
    guide = GUIDES[name](model)
    size = len(split.train[0])
    batch_size = LARGEST_BATCH if size > 2 * LARGEST_BATCH else size
    start = time.process_time()
    ps.fit(
        *(model, guide, split.train),
        num_steps=options.steps,
        batch_size=batch_size,
        progress=False,
    )
    seconds = time.process_time() - start
    x, y = split.test
    prediction = ps.predict(model, guide, x, num_samples=options.draws, y=y, stream=True)
    bound, divergence = expected_bound(model, guide, split.train, batch_size, PASSES)
    found = {
        "test log likelihood": float(prediction.log_density.mean()) - math.log(split.target_scale),
        "RMSE": float((prediction.mean - y).square().mean().sqrt()) * split.target_scale,
        "ELBO": bound,
        "KL": divergence,
        "CPU seconds": seconds,
    }
    return {quantity: f"{value:.5g}" for quantity, value in found.items()}


if __name__ == "__main__":
    main()
