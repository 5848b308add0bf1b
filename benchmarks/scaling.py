"""How the cost of one dense layer grows with its width, the batch, and the sizes of posteriors.

    make bench-scaling
    python -m benchmarks.scaling --sweep d --rounds 2 --largest 256 --figure figure.svg

One layer without a bias, with as many outputs as inputs, and a loss; no other size changes within a
sweep. Two times: loss and gradients (of the inputs too, as inside a net), and the full step, with Adam.
A round times every method at every size in turn, the layer without a posterior among them.

An exponent is the slope of the line of least squares through the logarithms of median times, over the
upper half of the sizes, with its standard error. The papers' tables and this package's pages count
multiplications: the same line through a count at the same sizes gives the exponent that a time bound
by arithmetic would have there, lower terms included.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.figure_sources import digest, metadata
from benchmarks.measure import describe_machine, quartiles, time_rounds
from benchmarks.sweeps import METHODS, SWEEPS, Method, Sizes
from benchmarks.tables import scaling_tables, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", choices=SWEEPS, action="append", help="default: every sweep")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=float, default=math.inf, help="leave out larger sizes")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--figure", type=Path, help="an image file for the figure")
    parser.add_argument("--drawn-from", type=Path, help="draw these results, and measure nothing")
    options = parser.parse_args()
    if options.drawn_from:
        draw(json.loads(options.drawn_from.read_text()), options.figure)
        return
    if options.rounds < 2:
        parser.error(f"`--rounds` must be at least 2, for quartiles, but got {options.rounds}.")
    sweeps = {
        name: measure_sweep(name, options.rounds, options.largest)
        for name in options.sweep or SWEEPS
    }
    results = {"machine": describe_machine(), "rounds": options.rounds, "sweeps": sweeps}
    print(scaling_tables(results))
    if options.output:
        write_results(results, options.output)
    if options.figure:
        draw(results, options.figure)


# ---- exponents -----------------------------------------------------------------------------------


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Return the slope of log costs over log sizes by least squares, and its standard error."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(costs, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    variance = (y - slope * x).square().sum() / (len(x) - 2)
    return slope.item(), (variance / (x @ x)).sqrt().item()


def exponents(
    method: Method, settings: list[Sizes], points: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return exponents of the times and of the counts, over the upper half of the sizes."""
    upper = slice(-max(3, len(points) // 2 + 1), None)  # at least three, or there is no error
    sizes = [point["size"] for point in points[upper]]
    measured = {
        task: fit_exponent(sizes, [point[task][1] for point in points[upper]])
        for task in ("gradients", "step")
    }
    counted = {
        source: fit_exponent(sizes, [count(setting) for setting in settings[upper]])[0]
        for source, count in (("paper", method.paper), ("ours", method.ours))
        if count is not None
    }
    return {"fitted": sizes} | measured | counted


# ---- measuring -----------------------------------------------------------------------------------


def measure_sweep(name: str, rounds: int, largest: float) -> dict[str, Any]:
    """Return the times of every method at its sizes, and the exponents."""
    sweep = SWEEPS[name]
    torch.manual_seed(0)
    settings = {
        title: [
            sweep.fixed._replace(**{name: size})
            for size in sweep.other.get(title, sweep.sizes)
            if size <= largest
        ]
        for title in sweep.methods
    }
    tasks = {
        f"{title}, {getattr(sizes, name)}": make_tasks(METHODS[title], sizes)
        for title, own in settings.items()
        for sizes in own
    }
    seconds = time_rounds(tasks, rounds, sweep.title)
    methods = {}
    for title, own in settings.items():
        points = []
        for size in (getattr(sizes, name) for sizes in own):
            gradients, adam = seconds[f"{title}, {size}"].values()
            full = [a + b for a, b in zip(gradients, adam, strict=True)]
            points.append({
                "size": size,
                "gradients": milliseconds(gradients),
                "step": milliseconds(full),
            })
        methods[title] = {"points": points, "exponents": exponents(METHODS[title], own, points)}
    return {"title": sweep.title, "methods": methods}


def milliseconds(seconds: list[float]) -> list[float]:
    return [round(1e3 * value, 4) for value in quartiles(seconds)]


def make_tasks(method: Method, sizes: Sizes) -> dict[str, Callable[[], None]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [nn.Linear(sizes.d, sizes.d, bias=False) for _ in range(sizes.L)]
    net = nn.Sequential(*layers).to(device)
    x = torch.randn(sizes.N, sizes.d, device=device, requires_grad=True)
    y = torch.randn(sizes.N, sizes.d, device=device)
    loss, parameters = make_loss(method, sizes, net)
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True)

    def adam() -> None:
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return {"gradients": lambda: loss(x, y).backward(), "Adam": adam}


def make_loss(
    method: Method, sizes: Sizes, net: nn.Module
) -> tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Parameter]]:
    if method.make is None:
        return lambda x, y: F.mse_loss(net(x), y), list(net.parameters())
    layers = method.layers and {"*": method.layers}
    bayes_net = ps.bayesianize(net, prior=0.3, layers=layers)
    model = ps.Regressor(bayes_net, num_data=60_000, noise_scale=0.1)
    guide = method.make(model, sizes)
    elbo = ps.StructuredELBO(num_particles=sizes.S, vectorize_particles=sizes.S > 1)
    return elbo(model, guide), [*guide.parameters(), *model.parameters()]


# ---- the figure ----------------------------------------------------------------------------------


LEGEND: dict[str, Any] = {
    "title": "exponents: measured, published",
    "fontsize": 8,
    "title_fontsize": 8,
    "loc": "center left",
    "bbox_to_anchor": (1, 0.5),
    "frameon": False,
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw a panel for each sweep: times of loss and gradients, and the lines that are fitted."""
    rc: Any = {"svg.fonttype": "none", "svg.hashsalt": "scaling", "font.size": 9}
    colors = {title: f"C{index}" for index, title in enumerate(METHODS)}
    sweeps = results["sweeps"]
    with matplotlib.rc_context(rc):
        figure = Figure(figsize=(5.2 * min(2, len(sweeps)), 3.2 * math.ceil(len(sweeps) / 2)))
        for index, sweep in enumerate(sweeps.values()):
            axes = figure.add_subplot(math.ceil(len(sweeps) / 2), min(2, len(sweeps)), index + 1)
            for title, method in sweep["methods"].items():
                draw_line(axes, title, method, colors[title])
            axes.set_xscale("log", base=2)
            title = sweep["title"].replace("; ", ";\n")
            axes.set(yscale="log", xlabel=title, ylabel="loss and gradients, ms")
            axes.legend(**LEGEND)
        figure.tight_layout()
        figure.savefig(path, metadata=metadata(path, digest(results)))


def draw_line(axes: Any, title: str, method: dict[str, Any], color: str) -> None:
    sizes = [point["size"] for point in method["points"]]
    times = [point["gradients"][1] for point in method["points"]]
    fit = method["exponents"]
    slope, fitted = fit["gradients"][0], fit["fitted"]
    stated = f", {fit['paper']:.2f}" if "paper" in fit else ""
    axes.plot(sizes, times, ".", color=color, label=f"{title}: {slope:.2f}{stated}")
    upper = times[-len(fitted) :]
    center, level = (statistics.geometric_mean(values) for values in (fitted, upper))
    axes.plot(fitted, [level * (size / center) ** slope for size in fitted], color=color, lw=0.8)


if __name__ == "__main__":
    main()
