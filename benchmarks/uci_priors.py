"""Priors and noise of UCI regressions, learned ones beside a grid, on a part held out of training.

    python -m benchmarks.uci_priors --data boston.npz --output benchmarks/results/uci_priors.csv
    python -m benchmarks.uci_priors --data boston.npz --prior learned --noise learned --noise 0.3
    python -m benchmarks.uci_priors --data boston.npz --prior 1 --splits 1 --steps 20 --draws 10

Each is trained on four fifths of a split's training part and measured on its last fifth: a recipe is
chosen without a look at the test part. Scales are in standardized units, those of weights times the
root of the fan-in.
"""

import argparse
from itertools import islice
from pathlib import Path

import pyro.distributions as dist
import torch

import pyro_structvi as ps
from benchmarks.rows import ResultsFile
from benchmarks.uci import GUIDES, Split, digits, held_out, make_model, measure, splits, units_of
from benchmarks.uci_priors_table import HEADER, LEARNED, priors_tables
from benchmarks.uci_tables import HETEROSCEDASTIC

PRIORS = {
    LEARNED: ps.HierarchicalScale(dist.LogNormal(0.0, 0.5), fan_in=True),
    **{scale: ps.FanIn(float(scale)) for scale in ("0.5", "1", "2", "4", "8")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="an .npz file")
    parser.add_argument("--guide", choices=GUIDES, default="mean field")
    parser.add_argument("--prior", choices=PRIORS, action="append", help="default: all")
    parser.add_argument(
        "--noise", action="append", help="heteroscedastic (default), learned, or a number"
    )
    parser.add_argument(
        "--annealed", choices=["0.5", "0"], default="0.5", help="0 has the whole KL in every step"
    )
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--draws", type=int, default=500, help="of each posterior")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    for path in options.data:
        for split in islice(splits(path, gaps=False), options.splits):
            for noise in options.noise or (HETEROSCEDASTIC,):
                for prior in options.prior or PRIORS:
                    key = (path.stem, split.name, options.guide, prior, noise, options.annealed)
                    if not results.has(*key):
                        results.add((*key, *values(path.stem, held_out(split), key, options)))
    print(priors_tables(results.rows))


def values(name: str, split: Split, key: tuple[str, ...], options: argparse.Namespace) -> list[str]:
    """Return what is measured of one setting."""
    *_, prior, noise, annealed = key
    torch.manual_seed(0)
    own = noise if noise in (HETEROSCEDASTIC, LEARNED) else float(noise)
    model = make_model(split, own, units_of(name), {"*.weight": PRIORS[prior], "*": 1.0})
    guide = GUIDES[options.guide](model)
    kl_weight = "annealed" if float(annealed) else 1.0
    found = measure(split, model, guide, options.steps, options.draws, kl_weight=kl_weight)
    return [digits(found[quantity]) for quantity in HEADER[6:]]


if __name__ == "__main__":
    main()
