"""The figure and numbers of the classifier on the page "Check a posterior".

    python docs/scripts/is_it_any_good.py

A classifier of the digits 0 to 4 under a k-tied posterior, also at the digits 5 to 9 and at blurred
images. It takes seconds.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import matplotlib
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.transforms.v2.functional import gaussian_blur

import pyro_structvi as ps
from pyro_structvi import metrics, plots
from pyro_structvi.plots.figures import figure_of, make_panels

Data = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "how_to")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    torch.manual_seed(0)
    matplotlib.rcParams["svg.hashsalt"] = "is it any good"
    classification(options.steps, options.folder)


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
    show("k-tied", asdict(metrics.classification_scores(inside.mean, y[400:])))
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
    path = folder / "is_it_any_good_classes.svg"
    figure_of(reliability).savefig(path, metadata={"Date": None})


def show(title: str, scores: dict[str, float]) -> None:
    shown = {name: value for name, value in scores.items() if isinstance(value, float)}
    print(title, "  ".join(f"{name} {value:.3f}" for name, value in shown.items()))


if __name__ == "__main__":
    main()
