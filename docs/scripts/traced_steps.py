"""What tracing a training step takes and saves, and what compiling does, in seconds and milliseconds.

    OMP_NUM_THREADS=1 python docs/scripts/traced_steps.py --net small --net mnist --compile

Steps are those of `fit`, by `StructuredAdam`; nets are those of the benchmarks. Milliseconds are
medians. Operations are those of loss and gradients, of which compiled steps of deep nets consist.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import pyro_structvi as ps
from benchmarks.nets import NETS, Net
from benchmarks.tables import markdown
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep, Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.replayed import Call
from pyro_structvi.testing import guides_for

COLUMNS = ["operations", "ordinary", "tracing, s", "traced"]
COMPILED = ["compiling, s", "compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    guides = guides_for("benchmarks")
    default = ["mean field", "k-tied, k = 2", "inducing 64"]
    parser.add_argument("--net", choices=NETS, action="append", help="default: small")
    parser.add_argument("--guide", choices=guides, action="append", help=f"default: {default}")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="by inductor too")
    options = parser.parse_args()
    rows = [
        [name, title, *measure(NETS[name], guides[title], options.rounds, options.compile)]
        for name in options.net or ["small"]
        for title in options.guide or default
    ]
    print(markdown(["", "", *COLUMNS, *(COMPILED if options.compile else [])], rows))


def measure(net: Net, make_guide: Callable[[Any], Any], rounds: int, compiles: bool) -> list[str]:
    torch.manual_seed(0)
    x, y = net.make_batch(torch.device("cpu"))
    model = ps.Classifier(ps.bayesianize(net.make(), prior=1.0), num_data=len(x))
    guide = make_guide(model)
    guide.initialize(x, y)
    loss = Loss(model, guide, ps.StructuredELBO())
    optimizer = OneOptimizer(ps.StructuredAdam(loss.trained.values(), guide, lr=1e-4))
    eager = EagerStep(loss, optimizer)
    engine = CompiledStep(loss, optimizer, watches=False, backend=None)
    ordinary = median(lambda: eager(x, y), rounds)
    for _ in range(2):
        engine(x, y)
    tracing = seconds(lambda: engine(x, y))
    engine(x, y)  # compared with a replay
    call = Call((x, y), {})
    step = engine.kind_of(call)
    assert step is not None
    cells = [str(step.num_operations), f"{ordinary:.3g}", f"{tracing:.2g}"]
    cells.append(f"{median(lambda: engine(x, y), rounds):.3g}")
    if compiles:
        cells.append(f"{seconds(lambda: step.compile('inductor', call)):.0f}")
        engine(x, y)  # compared
        cells.append(f"{median(lambda: engine(x, y), rounds):.3g}")
    return cells


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median(run: Callable[[], Any], rounds: int) -> float:
    """Return the milliseconds of a call."""
    run()
    return 1e3 * statistics.median(seconds(run) for _ in range(rounds))


if __name__ == "__main__":
    main()
