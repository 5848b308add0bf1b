"""Print what calls with one wrong argument say: ``python -m tests.bad_input.report [callable ...]``."""

import sys
from collections import Counter

import torch

from tests.bad_input.cases import CALLABLES, case_of
from tests.bad_input.exceptions import EXCEPTIONS, FINE, is_listed
from tests.bad_input.judging import judge, wrong_calls


def main(names):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    total = Counter()
    for name in names or CALLABLES:
        case, counts, lines = case_of(name), Counter(), []
        for argument, label, value in wrong_calls(case):
            if is_listed(FINE, case, argument, label):
                continue
            if any(is_listed(listed, case, argument, label) for listed in EXCEPTIONS.values()):
                counts["excepted"] += 1
                continue
            verdict, message = judge(case, argument, value)
            counts[verdict] += 1
            if verdict != "clear":
                lines.append(
                    f"    {verdict:8}{argument} = {label}: {' '.join(message.split())[:160]}"
                )
        print(name, dict(counts), *lines, sep="\n", flush=True)
        total += counts
    print("All", total.total(), "calls:", dict(total))


if __name__ == "__main__":
    main(sys.argv[1:])
