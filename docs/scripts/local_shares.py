"""The share of weights that are local in nets of other libraries, as a table in Markdown.

    python docs/scripts/local_shares.py

It needs the extra ``nets``.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import pyro_structvi as ps
from tests.any_net.nets import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=CASES, action="append", help="default: every net")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| net | random elements | local | drawn, and why |")
    print("|---|---|---|---|")
    for name in options.net or CASES:
        case = CASES[name]
        torch.manual_seed(0)
        model = case.model(case.make())
        report = ps.MeanFieldGuide(model).report(case.inputs(), case.labels())
        random = [each for each in report.parameters if each.state == "random"]
        count = sum(torch.Size(each.shape).numel() for each in random)
        reasons = sorted({each.why for each in random if each.drawn == "weight"})
        print(f"| {name} | {count:,} | {report.local_share:.0%} | {', '.join(reasons)} |")


if __name__ == "__main__":
    main()
