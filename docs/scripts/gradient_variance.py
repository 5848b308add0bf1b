"""Variance of the ELBO's gradient by sampled weights, sampled outputs and flipout.

    python docs/scripts/gradient_variance.py
    python docs/scripts/gradient_variance.py --net dense --batch-size 10 --figure /tmp/small.svg

The batch is fixed: only the noise of the weights varies. The table gives the variance of an element of
the gradient, averaged over the parameters of a kind, and in brackets the reduction relative to sampled
weights. *Weights* is one sample of the weights for the batch; *outputs* is local reparameterization,
with separate samples for each example; *flipout* is one sample of a convolution's filters with
separate signs for each example. The figure shows the table, a panel for each net.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import pyro_structvi as ps
from pyro_structvi.plots.figures import figure_of, make_panels

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

ESTIMATORS: dict[str, Any] = {"weights": False, "outputs": True, "flipout": "flipout"}
LABELS = {"weights": "sampled weights", "outputs": "sampled outputs", "flipout": "flipout"}
TITLES = {"dense": "net 20-50-1", "convolution": "two convolutions and a dense layer"}
FIGURE = Path(__file__).parents[1] / "understand/gradient_variance.svg"

Row = tuple[str, dict[str, float]]  # guide and kind of parameters, variance by estimator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append", help="default: both")
    parser.add_argument("--gradients", type=int, default=1000, help="gradients an estimate")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    matplotlib.rcParams.update({"svg.hashsalt": "gradient variance", "svg.fonttype": "none"})
    nets = options.net or list(NETS)
    panels = make_panels(1, len(nets), 2 + 3.7 * len(nets), 3.4, sharey=True)
    for ax, net in zip(panels, nets, strict=True):
        plot(ax, TITLES[net], measure(net, options.gradients, options.batch_size))
    panels[0].invert_yaxis()
    panels[0].legend(loc="lower left", fontsize="small")
    figure_of(panels[0]).savefig(options.figure, dpi=150, metadata={"Date": None})


def measure(net_name: str, gradients: int, batch_size: int) -> list[Row]:
    """Print the table of a net, and return its rows."""
    torch.manual_seed(0)
    shape, make_net = NETS[net_name]
    x = torch.randn(batch_size, *shape)
    y = x.flatten(1)[:, :1].sin()
    net = ps.bayesianize(make_net(), prior=0.3)
    model = ps.Regressor(net, num_data=len(x), noise_scale=0.1)
    print(f"{net_name}: torch {torch.__version__}, {gradients} gradients, batch {batch_size}")
    # A dense layer without positions has no use for flipout, nor has a low rank.
    names = [name for name in ESTIMATORS if net_name == "convolution" or name != "flipout"]
    print(f"{'guide':<17}{'parameters':<12}" + "".join(f"{name:>18}" for name in names))
    rows: list[Row] = []
    for title, make_guide in GUIDES.items():
        variances = {}
        for name in names:
            if (title, name) == ("low rank, K = 2", "flipout"):
                continue
            torch.manual_seed(1)
            guide = make_guide(model, init_scale=0.05, local_reparam=ESTIMATORS[name])
            variances[name] = gradient_variances(model, guide, x, y, gradients)
        for kind, sampled in variances["weights"].items():
            row = {name: of_kinds[kind] for name, of_kinds in variances.items()}
            cells = [f"{value:>10.3g} ({sampled / value:>5.1f})" for value in row.values()]
            print(f"{title:<17}{kind:<12}" + "".join(cells))
            rows.append((f"{title}: {kind}", row))
    return rows


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


def plot(ax: Axes, title: str, rows: list[Row]) -> None:
    for height, (_, row) in enumerate(rows):
        ax.hlines(height, min(row.values()), max(row.values()), color="0.8", zorder=1)
    for name, marker in zip(ESTIMATORS, "os^", strict=True):
        points = [(row[name], height) for height, (_, row) in enumerate(rows) if name in row]
        places = zip(*points, strict=True) if points else ((), ())
        ax.scatter(*places, marker=marker, label=LABELS[name])
    ax.set(title=title, xscale="log", xlabel="variance of an element of the gradient")
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])


if __name__ == "__main__":
    main()
