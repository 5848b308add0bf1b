"""The figures and numbers of the page "Is my posterior any good?".

    python docs/scripts/is_it_any_good.py

A regression with a gap in its inputs, under a k-tied posterior and under a point estimate, and a
classifier of the digits 0 to 4 that meets the others. Both take seconds.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.transforms.v2.functional import gaussian_blur

import pyro_structvi as ps
from pyro_structvi import diagnostics, metrics, plots
from pyro_structvi.plots.figures import make_panels

Data = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "how_to")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--nuts", type=int, default=1000, help="draws of NUTS; 0 leaves it out")
    options = parser.parse_args()
    torch.manual_seed(0)
    matplotlib.rcParams["svg.hashsalt"] = "is it any good"
    regression(options.steps, options.nuts, options.folder)
    classification(options.steps, options.folder)


# ---- regression ----------------------------------------------------------------------------------


def noisy_sine(size: int) -> Data:
    """Return inputs on both sides of a gap, and targets with noise of 0.1."""
    x = torch.cat([torch.rand(size // 2, 1) - 1.2, torch.rand(size // 2, 1) + 0.2])
    return x, torch.sin(4 * x) + 0.1 * torch.randn_like(x)


def regression(steps: int, nuts: int, folder: Path) -> None:
    data, (x, y) = noisy_sine(40), noisy_sine(400)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=ps.FanIn(2.0)), num_data=40, noise_scale=0.1)
    posteriors: dict[str, Any] = {
        "k-tied": ps.KTiedGuide(model, join_bias=False),
        "point": ps.MAPGuide(model),
    }
    for guide in posteriors.values():
        ps.fit(model, guide, data, num_steps=steps, progress=False)
    print("k-hat", round(diagnostics.pareto_k(model, posteriors["k-tied"], *data).k_hat, 2))
    if nuts:
        posteriors["NUTS"] = ps.reference.nuts(
            model, *data, num_samples=nuts // 4, num_warmup=500, progress=False
        )
    predictions = {
        name: ps.predict(model, own, x, num_samples=300, y=y) for name, own in posteriors.items()
    }
    for name, own in predictions.items():
        show(name, asdict(metrics.regression_scores(own, y)))
    levels = [level / 10 for level in range(1, 10)]
    observed = {
        name: [each.observed for each in diagnostics.expected_coverage(own, y, levels).values()]
        for name, own in predictions.items()
    }
    grid = torch.linspace(-2.5, 2.5, 201).unsqueeze(-1)
    banded = [name for name in posteriors if name != "point"]
    coverage = plots.plot_coverage(levels, observed, num_examples=len(x))
    save(coverage, folder / "is_it_any_good_coverage.svg")
    bands = make_panels(1, len(banded), 4.5 * len(banded), 3.0)
    for ax, name in zip(bands, banded, strict=True):
        prediction = ps.predict(model, posteriors[name], grid, num_samples=300)
        draw_band(ax, prediction, grid, data)
        ax.set_title(name)
        ax.set_ylim(-3, 3)
        show_scales(name, grid, prediction)
    save(bands[0], folder / "is_it_any_good_bands.svg")


def show_scales(name: str, grid: Tensor, prediction: Any) -> None:
    """Print standard deviations of the function near data, in the gap, and beyond the data."""
    scales = prediction.function_variance.sqrt().flatten()
    for place in (0.7, 0.0, 2.5):
        nearest = (grid.flatten() - place).abs().argmin()
        print(f"{name}: standard deviation of f({place}) {float(scales[nearest]):.2f}")


def draw_band(ax: Any, prediction: Any, grid: Tensor, data: Data) -> None:
    ends = [prediction.interval(level) for level in (0.95, 0.5)]
    lower, upper = (torch.stack([e.flatten() for e in own]) for own in zip(*ends, strict=True))
    points = {"data_x": data[0].flatten(), "data_y": data[1].flatten()}
    flat = grid.flatten(), prediction.mean.flatten()
    plots.plot_band(*flat, ax=ax, lower=lower, upper=upper, **points)


# ---- classes -------------------------------------------------------------------------------------


def digits(classes: Callable[[Tensor], Tensor]) -> Data:
    """Return images of handwritten digits ``(N, 1, 8, 8)`` from 0 to 1, and their classes."""
    images, y = map(torch.as_tensor, load_digits(return_X_y=True))
    chosen = classes(y)
    return images[chosen].float().div(16).reshape(-1, 1, 8, 8), y[chosen]


def classification(steps: int, folder: Path) -> None:
    (x, y), (others, _) = digits(lambda y: y < 5), digits(lambda y: y >= 5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 5))
    model = ps.Classifier(ps.bayesianize(net, prior=ps.FanIn(4.0)), num_data=400)
    guide = ps.KTiedGuide(model, join_bias=False)
    ps.fit(model, guide, (x[:400], y[:400]), num_steps=steps, progress=False)
    inside, outside = ps.predict(model, guide, x[400:]), ps.predict(model, guide, others)
    show("digits", asdict(metrics.classification_scores(inside.mean, y[400:])))
    for name in ("entropy", "mutual_information"):
        scores = metrics.detection_scores(getattr(inside, name), getattr(outside, name))
        show(name, asdict(scores))
    for width in (0.4, 0.7, 1.0):
        harder = gaussian_blur(x[400:], 9, width)
        p = ps.predict(model, guide, harder).mean
        show(f"blur {width}", asdict(metrics.classification_scores(p, y[400:])))
    reliability, histogram = make_panels(1, 2, 9.5, 3.0)
    plots.plot_reliability(inside.mean, y[400:], ax=reliability)
    entropies = {"0 to 4": inside.entropy, "5 to 9": outside.entropy}
    for name, own in entropies.items():
        histogram.hist(own, 30, density=True, alpha=0.5, label=name)
    histogram.set(xlabel="entropy (nats)", ylabel="density")
    histogram.legend()
    save(reliability, folder / "is_it_any_good_classes.svg")


def show(title: str, scores: dict[str, float]) -> None:
    shown = {name: value for name, value in scores.items() if isinstance(value, float)}
    print(title, "  ".join(f"{name} {value:.3f}" for name, value in shown.items()))


def save(ax: Any, path: Path) -> None:
    ax.figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
