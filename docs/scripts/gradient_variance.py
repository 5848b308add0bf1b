"""Variance of the ELBO's gradient, with drawn weights and by local reparameterization.

    python docs/scripts/gradient_variance.py
    python docs/scripts/gradient_variance.py --figure build/gradient_variance.png

The batch is fixed, so that only the noise of the weights varies. The table gives the variance of one
gradient, averaged over the parameters of a kind, and the ratio of the two estimators. *Drawn* is the
naive estimator, one draw of the weights that all examples share; *local* draws outputs, for each
example its own. The figure shows the table.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import pyro_structvi as ps

GUIDES: dict[str, Callable[..., ps.StructuredGuide]] = {
    "mean field": ps.MeanFieldGuide,
    "k-tied, k = 2": ps.KTiedGuide,
    "low rank, K = 2": lambda model, **options: ps.AutoLowRankLRT(model, rank=2, **options),
}

Row = tuple[str, str, float, float]  # guide, kind of parameters, variance drawn and local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradients", type=int, default=1000, help="gradients an estimate")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--figure", type=Path, default=Path("gradient_variance.png"))
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(options.batch_size, 20)
    y = x[:, :1].sin()
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=0.3), num_data=len(x), noise_scale=0.1)
    print(f"torch {torch.__version__}, {options.gradients} gradients, batch {options.batch_size}")
    print(f"{'guide':<17}{'parameters':<12}{'drawn':>10}{'local':>10}{'ratio':>8}")
    rows: list[Row] = []
    for title, make_guide in GUIDES.items():
        variances = []
        for local_reparam in (False, True):
            torch.manual_seed(1)
            guide = make_guide(model, init_scale=0.05, local_reparam=local_reparam)
            variances.append(gradient_variances(model, guide, x, y, options.gradients))
        drawn, local = variances
        for kind in drawn:
            ratio = drawn[kind] / local[kind]
            print(f"{title:<17}{kind:<12}{drawn[kind]:>10.3g}{local[kind]:>10.3g}{ratio:>8.1f}")
            rows.append((title, kind, drawn[kind], local[kind]))
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
    titles, kinds, drawn, local = zip(*rows, strict=True)
    heights = range(len(rows))
    axes.hlines(heights, local, drawn, color="0.8", zorder=1)
    axes.scatter(drawn, heights, label="drawn weights")
    axes.scatter(local, heights, marker="s", label="local reparameterization")
    axes.set(xscale="log", xlabel="variance of an element of the gradient")
    labels = [f"{title}: {kind}" for title, kind in zip(titles, kinds, strict=True)]
    axes.set_yticks(heights, labels)
    axes.invert_yaxis()
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
