"""What tracing a step takes and saves: its operations, run by Python, by torch's interpreter, compiled.

    OMP_NUM_THREADS=1 python docs/scripts/traced_steps.py --compile

For the MLP 20-50-10 of the benchmarks. Milliseconds are medians: of loss and gradients for the ways to
run the trace, and of a whole step for the ordinary one.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import pyro_structvi as ps
from benchmarks.nets import NETS
from benchmarks.tables import markdown
from pyro_structvi.infer.steps.call import Call
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.finite import FiniteCheck
from pyro_structvi.infer.steps.loss import CheckedLoss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.testing import guides_for

COLUMNS = ["operations", "ordinary step", "tracing, s", "Python", "interpreter"]
COMPILED = ["compiling, s", "compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    guides = guides_for("benchmarks")
    default = ["mean field", "k-tied, k = 2", "inducing 64"]
    parser.add_argument("--guide", choices=guides, action="append", help=f"default: {default}")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="by inductor too")
    options = parser.parse_args()
    rows = [
        [title, *measure(guides[title], options.rounds, options.compile)]
        for title in options.guide or default
    ]
    print(markdown(["", *COLUMNS, *(COMPILED if options.compile else [])], rows))


def measure(make_guide: Callable[[Any], Any], rounds: int, compiles: bool) -> list[str]:
    torch.manual_seed(0)
    net = NETS["small"]
    x, y = net.make_batch(torch.device("cpu"))
    model = ps.Classifier(ps.bayesianize(net.make(), prior=1.0), num_data=len(x))
    guide = make_guide(model)
    guide.initialize(x, y)
    loss = CheckedLoss(model, guide, ps.StructuredELBO())
    optimizer = OneOptimizer(torch.optim.Adam([*loss.trained.values()], lr=1e-4, fused=True))
    parts = loss, optimizer, FiniteCheck(loss, optimizer)
    eager, engine = EagerStep(*parts), CompiledStep(*parts, backend=None)
    ordinary = median(lambda: eager(x, y), rounds)
    engine(x, y)
    tracing = seconds(lambda: engine(x, y))
    step = engine.kind_of(Call((x, y), {}))
    assert step is not None
    traced = step._traced
    assert traced is not None
    inputs = [step._kl_weight, x, y]
    by_python = median(lambda: traced(inputs), rounds)
    traced.interpret()
    by_interpreter = median(lambda: traced(inputs), rounds)
    count = sum(node.op == "call_function" for node in traced.graph.graph.nodes)
    cells = [str(count), f"{ordinary:.2f}", f"{tracing:.2f}"]
    cells += [f"{by_python:.2f}", f"{by_interpreter:.2f}"]
    if compiles:

        def compile_and_run() -> None:
            traced.compile("inductor", inputs)
            traced(inputs)

        cells.append(f"{seconds(compile_and_run):.0f}")
        cells.append(f"{median(lambda: traced(inputs), rounds):.2f}")
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
