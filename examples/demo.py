"""The main job: posteriors of a small regression net beside NUTS, and handwritten digits.

Part 1 is the regression of Ritter et al. (2021), section 4.1: two clusters of inputs, a net with 50
tanh units, whose exact posterior NUTS can sample. Part 2 classifies the 8 x 8 digits that ship with
scikit-learn.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_structvi as ps
from pyro_structvi import reference, subnetwork
from pyro_structvi.families import Dropout, PointEstimate
from pyro_structvi.infer import CosineDecay
from pyro_structvi.metrics import classification_scores, predictive_distance
from pyro_structvi.plots import plot_regressions
from pyro_structvi.testing import guides_for, points_for

METHODS: dict[str, Callable[[Any], nn.Module]] = {
    **points_for("demo"),
    # The first layer keeps all its inputs.
    "MC dropout": lambda model: ps.StructuredGuide(
        model, {"net.0.*": PointEstimate(), "*": Dropout(rate=0.1)}
    ),
    **guides_for("demo"),
}

SUBNETWORK = "subnetwork of 50"  # needs the MAP first

# Its covariance of the first layer for the digits would have five million parameters.
REGRESSION_ONLY = {"full covariance"}

# Layers of another kind, and so nets of their own, of which NUTS would sample another posterior.
LAYERS: dict[str, tuple[Any, Callable[[Any], nn.Module]]] = {
    "Walsh-Hadamard": (ps.WalshHadamard(), lambda model: ps.MeanFieldGuide(model)),
    "Walsh-Hadamard, full": (ps.WalshHadamard(), lambda model: ps.FullCovarianceGuide(model)),
    "rank-1": (ps.RankOne(), lambda model: ps.MeanFieldGuide(model)),
    "BatchEnsemble": (
        ps.RankOne(prior_scale=1.0, start="signs"),
        lambda model: ps.EnsembleGuide(model, size=5),
    ),
}

# With points among the posteriors, what is maximized bounds no evidence.
NO_BOUND = {"MAP", "Ensemble-W", "MC dropout", "Ensemble-U", SUBNETWORK}

REGIONS = {
    "on data": ((-1, -0.7), (0.5, 1)),
    "between": ((-0.7, 0.5),),
    "outside": ((-2, -1), (1, 2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for files")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps only, to see that it runs"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # nets this small only lose by more
    run_regression(options.output, options.smoke)
    run_digits(options.smoke)
    print(f"\nFigure and ArviZ files are in {options.output}/.")


# ---- part 1: regression --------------------------------------------------------------------------


def run_regression(output: Path, smoke: bool) -> None:
    x, y = make_regression()
    grid = torch.linspace(-2, 2, 201).unsqueeze(-1)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    bayes_net = ps.bayesianize(net, prior=ps.FanIn(scale=4.0, vector_scale=1.0))
    model = ps.Regressor(bayes_net, num_data=len(x), noise_scale=0.1)

    print("Regression: NUTS, the reference")
    draws_per_chain = 20 if smoke else 500
    nuts = reference.nuts(model, x, y, num_warmup=draws_per_chain, num_samples=draws_per_chain)
    print(
        f"{nuts.num_chains} chains x {draws_per_chain} draws, R-hat of the function at the data "
        f"{nuts.r_hat:.3f}, {nuts.divergences} divergences"
    )
    predictions = {"NUTS": ps.predict(model, nuts, grid)}
    ps.to_inference_data(model, nuts, x, y).to_netcdf(output / "nuts.nc")

    rows, guides = [], {}
    for title in [*METHODS, SUBNETWORK]:
        print(f"Regression: {title}")
        torch.manual_seed(0)  # so that no row depends on another
        guides[title] = guide = make_guide(title, model, guides, x)
        steps = 20 if smoke else 10_000
        start = time.perf_counter()
        ps.fit(model, guide, (x, y), num_steps=steps, lr=0.01, lr_schedule=CosineDecay(steps))
        milliseconds = 1e3 * (time.perf_counter() - start) / steps
        predictions[title] = ps.predict(model, guide, grid, num_samples=draws_per_chain * 4)
        name = title.replace(",", "").replace(" = ", "").replace(" ", "_").replace("-", "_")
        ps.to_inference_data(model, guide, x, y, num_samples=4 * draws_per_chain).to_netcdf(
            output / f"{name}.nc"
        )
        parameters = sum(parameter.numel() for parameter in guide.parameters())
        with torch.no_grad():
            objective = ps.StructuredELBO(num_particles=20 if smoke else 500)
            bound = objective.terms(model, guide, x, y).elbo
        distances = distances_by_region(
            grid, predictions[title].functions, predictions["NUTS"].functions
        )
        elbo = "-" if title in NO_BOUND else f"{bound:.1f}"
        rows.append([title, str(parameters), elbo, f"{milliseconds:.2f}", *distances])

    header = ["guide", "parameters", "ELBO", "ms/step", *REGIONS]
    print("\nDistance of the function's posterior to that of NUTS: difference of means, ratio of")
    print("standard deviations, 1-Wasserstein distance")
    print_table(header, rows)
    figure = plot_regressions(predictions, grid, x, y, truth=true_function(grid), limits=(-3, 3))
    figure.savefig(output / "regression.png", dpi=150)


def make_guide(title: str, model: Any, fitted: dict[str, nn.Module], x: Tensor) -> nn.Module:
    """Make a guide; that of a subnetwork is chosen by Laplace variances around the fitted MAP."""
    if title != SUBNETWORK:
        return METHODS[title](model)
    variances = subnetwork.laplace_variances(model, fitted["MAP"], x, num_samples=10)
    return ps.SubnetworkGuide(model, subnetwork.largest(variances, size=50), fitted["MAP"])


def make_regression(size: int = 100) -> tuple[Tensor, Tensor]:
    left, right = -1 + 0.3 * torch.rand(size // 2, 1), 0.5 + 0.5 * torch.rand(size // 2, 1)
    x = torch.cat([left, right])
    return x, true_function(x) + 0.1 * torch.randn_like(x)


def true_function(x: Tensor) -> Tensor:
    return torch.cos(4 * x + 0.8)


def distances_by_region(grid: Tensor, functions: Tensor, exact: Tensor) -> list[str]:
    cells = []
    for intervals in REGIONS.values():
        inside = torch.zeros(len(grid), dtype=torch.bool)
        for low, high in intervals:
            inside |= ((grid >= low) & (grid <= high)).flatten()
        distance = predictive_distance(functions[:, inside], exact[:, inside])
        cells.append(" ".join(f"{number:.2f}" for number in astuple(distance)))
    return cells


# ---- part 2: digits ------------------------------------------------------------------------------


def run_digits(smoke: bool) -> None:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(x))
    test, train = order[:360], order[360:]
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    # Of the prior scales 1.4, 3, 5 and 8, this one has the largest ELBO.
    prior = ps.FanIn(scale=5.0)
    model = ps.Classifier(ps.bayesianize(net, prior), num_data=len(train))

    rows, guides = [], {}
    for title in [*METHODS, SUBNETWORK, *LAYERS]:
        if title in REGRESSION_ONLY:
            continue
        print(f"Digits: {title}")
        torch.manual_seed(0)
        if title in LAYERS:
            layer, make = LAYERS[title]
            bayes_net = ps.bayesianize(net, prior, layers={"*": layer})
            model = ps.Classifier(bayes_net, num_data=len(train))
            guide = make(model)
        else:
            guide = make_guide(title, model, guides, x[train])
        guides[title] = guide
        epochs = 1 if smoke else 250
        ps.fit(
            model,
            guide,
            (x[train], y[train]),
            num_epochs=epochs,
            batch_size=128,
            lr=1e-2,
            lr_schedule=CosineDecay(12 * epochs),
            kl_weight=ps.LinearAnnealing(6 * epochs),
        )
        prediction = ps.predict(model, guide, x[test], num_samples=100)
        scores = classification_scores(prediction.mean, y[test])
        parameters = sum(
            parameter.numel() for root in (guide, model) for parameter in root.parameters()
        )
        cells = [f"{scores.accuracy:.3f}", f"{scores.nll:.3f}", f"{scores.calibration_error:.3f}"]
        rows.append([title, str(parameters), *cells])
    print()
    print_table(["guide", "parameters", "accuracy", "NLL (nats)", "calibration error"], rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    main()
