"""Variance of the ELBO's gradient by drawn weights, local reparameterization and flipout.

    python docs/scripts/gradient_variance.py
    python docs/scripts/gradient_variance.py --net convolution --figure build/gradient_variance.png

The batch is fixed, so that only the noise of the weights varies. The table gives the variance of one
gradient, averaged over the parameters of a kind, and how many times that of drawn weights is larger.
*Drawn* is the naive estimator, one draw of the weights that all examples share; *local* draws outputs,
for each example its own; *flipout* gives one draw of a convolution's filters other signs for each
example. The figure shows the table.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import pyro_structvi as ps

GUIDES: dict[str, Callable[..., ps.StructuredGuide]] = {
    "mean field": ps.MeanFieldGuide,
    "k-tied, k = 2": partial(ps.KTiedGuide, join_bias=False),
    "low rank, K = 2": partial(ps.AutoLowRankLRT, rank=2, diagonal="constant", join_bias=False),
}

NETS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "dense": ((20,), lambda: nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))),
    "convolution": (
        (1, 8, 8),
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(128, 1),
        ),
    ),
}

ESTIMATORS: dict[str, Any] = {"drawn": False, "local": True, "flipout": "flipout"}

Row = tuple[str, dict[str, float]]  # guide and kind of parameters, variance by estimator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, default="dense")
    parser.add_argument("--gradients", type=int, default=1000, help="gradients an estimate")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--figure", type=Path, default=Path("gradient_variance.png"))
    options = parser.parse_args()

    torch.manual_seed(0)
    shape, make_net = NETS[options.net]
    x = torch.randn(options.batch_size, *shape)
    y = x.flatten(1)[:, :1].sin()
    net = ps.bayesianize(make_net(), prior=0.3)
    model = ps.Regressor(net, num_data=len(x), noise_scale=0.1)
    print(f"torch {torch.__version__}, {options.gradients} gradients, batch {options.batch_size}")
    # A dense layer without positions has no use for flipout, nor has a low rank.
    names = [name for name in ESTIMATORS if options.net == "convolution" or name != "flipout"]
    print(f"{'guide':<17}{'parameters':<12}" + "".join(f"{name:>18}" for name in names))
    rows: list[Row] = []
    for title, make_guide in GUIDES.items():
        variances = {}
        for name in names:
            if (title, name) == ("low rank, K = 2", "flipout"):
                continue
            torch.manual_seed(1)
            guide = make_guide(model, init_scale=0.05, local_reparam=ESTIMATORS[name])
            variances[name] = gradient_variances(model, guide, x, y, options.gradients)
        for kind, drawn in variances["drawn"].items():
            row = {name: of_kinds[kind] for name, of_kinds in variances.items()}
            cells = [f"{value:>10.3g} ({drawn / value:>5.1f})" for value in row.values()]
            print(f"{title:<17}{kind:<12}" + "".join(cells))
            rows.append((f"{title}: {kind}", row))
    plot(rows).savefig(options.figure, dpi=150)


def gradient_variances(
    model: ps.Regressor, guide: ps.StructuredGuide, x: Tensor, y: Tensor, count: int
) -> dict[str, float]:
    loss = ps.StructuredELBO()(model, guide)
    loss(x, y)  # the run that counts uses
    kinds: dict[str, list[Tensor]] = {}
    for name, value in guide.named_parameters():
        kinds.setdefault(kind_of(name), []).append(value)
    return {kind: variance(loss, values, x, y, count) for kind, values in kinds.items()}


def kind_of(name: str) -> str:
    if name.endswith("loc"):
        return "means"
    return "factors" if name.endswith("factors") else "log scales"


def variance(
    loss: Callable[..., Tensor], parameters: list[Tensor], x: Tensor, y: Tensor, count: int
) -> float:
    gradients = torch.stack([
        torch.cat([part.flatten() for part in torch.autograd.grad(loss(x, y), parameters)])
        for _ in range(count)
    ])
    return float(gradients.var(0).mean())


def plot(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(7, 0.5 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for height, (_, row) in enumerate(rows):
        axes.hlines(height, min(row.values()), max(row.values()), color="0.8", zorder=1)
    for name, marker in zip(ESTIMATORS, "os^", strict=True):
        points = [(row[name], height) for height, (_, row) in enumerate(rows) if name in row]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, label=name)
    axes.set(xscale="log", xlabel="variance of an element of the gradient")
    axes.set_yticks(range(len(rows)), [title for title, _ in rows])
    axes.invert_yaxis()
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
