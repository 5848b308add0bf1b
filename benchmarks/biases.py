"""The ELBO with biases apart from their weights and joined to them, over five starts.

python -m benchmarks.biases --problem cosine --problem digits
python -m benchmarks.biases --problem cosine --steps 20  # to see that it runs
"""

import argparse
import math
from functools import partial
from statistics import fmean, stdev

import torch

import pyro_structvi as ps
from benchmarks.convergence import bound
from benchmarks.markdown import markdown
from benchmarks.problems import PROBLEMS

STARTS = 5
GUIDES = {
    "k-tied": ps.KTiedGuide,
    "low rank": partial(ps.AutoLowRankLRT, rank=5, diagonal="full"),
    "matrix normal": ps.MatrixNormalGuide,
    "rowwise": ps.RowwiseGuide,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=PROBLEMS, action="append", required=True)
    parser.add_argument("--guide", choices=GUIDES, action="append", help="default: every guide")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for problem in options.problem:
        for guide in options.guide or GUIDES:
            cells = [measure(problem, guide, joined, options.steps) for joined in (False, True)]
            rows.append([problem, guide, *cells])
            print(*rows[-1], flush=True)
    print(markdown(["problem", "guide", "apart", "joined"], rows))


def measure(name: str, guide: str, join_bias: bool, steps: int) -> str:
    """Return the mean ELBO of five starts with its standard error."""
    torch.manual_seed(0)  # of data and net
    problem = PROBLEMS[name]()
    torch.manual_seed(1)
    make = partial(GUIDES[guide], join_bias=join_bias)
    mixture = ps.MixtureGuide(problem.model, make, STARTS)
    own = {"num_steps": steps, "batch_size": problem.batch_size, "progress": False}
    ps.fit(problem.model, mixture, (problem.x, problem.y), **own)
    bounds = [bound(problem, member, 100)[0] for member in mixture.members]
    return f"{fmean(bounds):.1f} ± {stdev(bounds) / math.sqrt(STARTS):.1f}"


if __name__ == "__main__":
    main()
