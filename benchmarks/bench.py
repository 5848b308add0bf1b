"""Cost of a training step and of predictions beside the same net without a posterior.

    make bench                                      # every net and method
    make bench BENCH="--net wide --rounds 30"
    make bench BENCH="--against pyro --compiled --output benchmarks/results/bench.json"
    make bench BENCH="--chosen --output benchmarks/results/costs.json"  # of the front page

A round times a step and then a prediction of every method in turn, so that a busy machine slows all
alike. A ratio is that of two times of one round; the table gives its median over rounds, and its
quartiles. A step is loss, gradients and Adam, for the net without a posterior too. A prediction is
``predict`` with S function draws on the batch; it is divided by S forward passes of the net, in
evaluation mode and without gradients, and the mean of their class probabilities. Memory is the peak of
live tensors, parameters included, in a step, or in a prediction before any training, over that of the
net. ``--compiled`` adds steps that are traced and steps that are compiled, as those of ``fit`` with its
optimizer, and the net's own step compiled; they predict as their guides do. Compiling is not timed.
``--chosen`` measures traced steps of the guides that the front page names, with their options.

``make`` also tells glibc to keep freed memory: getting large tensors from the system page by page
would be a good part of some steps, and is no part of the work.
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Times, describe_machine, peak_bytes, quartiles, time_rounds
from benchmarks.methods import (
    CHOSEN_METHODS,
    COMPILED_METHODS,
    DETERMINISTIC,
    METHODS,
    ONLY,
    PYRO_METHODS,
    TRACED_METHODS,
    MakeMethod,
    Method,
)
from benchmarks.nets import NETS, OWN_NETS, Net
from benchmarks.tables import machine_line, net_table, write_results
from pyro_structvi.nn import PointEstimateWarning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append", help="default: every net of torch")
    parser.add_argument("--guide", choices=METHODS, action="append", help="default: every guide")
    parser.add_argument("--against", choices=["pyro"], help="Pyro's autoguides too, under its SVI")
    parser.add_argument("--compiled", action="store_true", help="traced and compiled steps too")
    parser.add_argument("--chosen", action="store_true", help="guides of the front page only")
    parser.add_argument("--rounds", type=int, help="default: by the net")
    parser.add_argument("--times-only", action="store_true", help="without memory")
    parser.add_argument("--samples", type=int, default=10, help="draws of a prediction")
    parser.add_argument("--output", type=Path, help="a JSON file, where other nets stay")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"`--rounds` must be at least 2, for quartiles, but got {options.rounds}.")
    warnings.simplefilter("ignore", PointEstimateWarning)  # of batch norms
    titles = [DETERMINISTIC, *(options.guide or METHODS)]
    methods = {title: METHODS[title] for title in titles}
    if options.compiled:
        chosen = [f"{title}, {how}" for how in ("traced", "compiled") for title in titles]
        faster = TRACED_METHODS | COMPILED_METHODS
        methods |= {title: make for title, make in faster.items() if title in chosen}
    methods |= PYRO_METHODS if options.against else {}
    if options.chosen:
        methods = {DETERMINISTIC: METHODS[DETERMINISTIC], **CHOSEN_METHODS}
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "samples": options.samples,
        "nets": {},
    }
    if options.output and options.output.exists():
        results["nets"] = json.loads(options.output.read_text())["nets"]
    print(machine_line(results))
    for name in options.net or (["small", "wide"] if options.chosen else OWN_NETS):
        own = {title: make for title, make in methods.items() if name in ONLY.get(title, NETS)}
        rounds = options.rounds or NETS[name].rounds
        results["nets"][name] = measure_net(
            *(NETS[name], own, rounds, options.samples), has_memory=not options.times_only
        )
        print(f"\n{NETS[name].title}\n\n{net_table(results['nets'][name])}", flush=True)
        if options.output:
            write_results(results, options.output)


def measure_net(
    net: Net, methods: dict[str, MakeMethod], rounds: int, samples: int, has_memory: bool = True
) -> dict[str, Any]:
    """Return the medians and quartiles of times and ratios, and the peaks of memory where asked."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x, y = net.make_batch(device)
    memory = {
        title: peak_bytes(live(net, make, x, y, samples)) if has_memory else {}
        for title, make in methods.items()
    }
    ready = {title: make(net.make().to(device), x, y) for title, make in methods.items()}
    for one in ready.values():
        for _ in range(one.warm_up):
            one.step()
    tasks = {title: list_tasks(one, samples) for title, one in ready.items()}
    seconds = time_rounds(tasks, rounds, net.title)
    return {
        "title": net.title,
        "rounds": rounds,
        "methods": {
            title: {
                task: summary(seconds, title, task)
                | ({"bytes": memory[title][task]} if has_memory else {})
                for task in own
            }
            for title, own in tasks.items()
        },
    }


def list_tasks(method: Method, samples: int) -> dict[str, Callable[[], Any]]:
    predict = method.predict
    step = {"step": method.step}
    return step if predict is None else step | {"prediction": lambda: predict(samples)}


def live(net: Net, make: MakeMethod, x: Tensor, y: Tensor, samples: int) -> Iterator[str]:
    """Predict and train."""
    method = make(net.make().to(x.device), x, y)
    yield "start"
    if method.predict is not None:
        method.predict(samples)
    yield "prediction"
    for _ in range(method.warm_up):
        method.step()
    yield "first steps"
    method.step()
    yield "step"


def summary(seconds: Times, title: str, task: str) -> dict[str, Any]:
    own, base = seconds[title][task], seconds[DETERMINISTIC][task]
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    return {
        "milliseconds": [round(1e3 * value, 4) for value in quartiles(own)],
        "ratio": [round(value, 4) for value in quartiles(ratios)],
    }


if __name__ == "__main__":
    main()
