"""The main job: posteriors of a small regression net beside NUTS, and handwritten digits.

Part 1 is the regression of Ritter et al. (2021), section 4.1: two clusters of inputs, a net with 50
tanh units, whose exact posterior NUTS can sample. Part 2 classifies the 8 x 8 digits that ship with
scikit-learn. Seven guides are compared, two at a time; ``--all`` takes every one.
"""

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import torch
from progress import Progress, Table, as_they_come, begin_process, count_steps
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_structvi as ps
from pyro_structvi import element_scores
from pyro_structvi.families import Dropout, PointEstimate
from pyro_structvi.testing import guides_for, layered_for, points_for

METHODS: dict[str, Callable[[Any], nn.Module]] = {
    **points_for("demo"),
    # The first layer keeps all its inputs.
    "MC dropout": lambda model: ps.StructuredGuide(
        model, {"net.0.*": PointEstimate(), "*": Dropout(rate=0.1)}
    ),
    **guides_for("demo"),
    **layered_for("demo"),
}

# What is run unless every guide is asked for.
SHOWN = [
    *("mean field", "k-tied, k = 2", "rowwise, joined", "low rank, full diagonal"),
    *("FFG-U, 64 x 64", "Ensemble-W", "global inducing"),
]

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

NUTS_WARMUP, NUTS_DRAWS = 250, 200  # of each of four chains; R-hat is then below 1.01
REGRESSION_STEPS, DIGITS_EPOCHS, STEPS_PER_EPOCH = 3_000, 200, 12
NUM_TEST = 360  # of the 1,797 digits
DIGITS_STEPS = DIGITS_EPOCHS * STEPS_PER_EPOCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for files")
    parser.add_argument("--all", action="store_true", help="every guide, not seven")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps only, to see that it runs"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    every = [*METHODS, SUBNETWORK]
    regression = every if options.all else SHOWN
    digits = [*every, *LAYERS] if options.all else SHOWN
    digits = [title for title in digits if title not in REGRESSION_ONLY]
    counts = [len(titles) + (SUBNETWORK in titles) for titles in (regression, digits)]
    of_each = (20, STEPS_PER_EPOCH) if options.smoke else (REGRESSION_STEPS, DIGITS_STEPS)
    steps = sum(count * own for count, own in zip(counts, of_each, strict=True))
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with (
        Progress(steps, done) as progress,
        ProcessPoolExecutor(2, context, begin_process, (done,)) as pool,
    ):
        fits = start(pool, fit_regression, regression, options.smoke, options.output)
        others = start(pool, fit_digits, digits, options.smoke)
        show_regression(fits, options.output, options.smoke, progress)
        show_digits(others, progress)


def start(
    pool: Executor, fit: Callable[..., Any], titles: Iterable[str], *args: Any
) -> dict[str, Future[Any]]:
    return {title: pool.submit(fit, title, *args) for title in titles}


# ---- part 1: regression --------------------------------------------------------------------------


class Regression(NamedTuple):
    """What a guide reaches on the regression."""

    parameters: int
    elbo: float
    milliseconds: float
    prediction: Any


def fit_regression(title: str, smoke: bool, output: Path) -> Regression:
    model, x, y = make_regression()
    torch.manual_seed(0)  # so that no row depends on another
    steps, draws = (20, 80) if smoke else (REGRESSION_STEPS, 4 * NUTS_DRAWS)

    def fit(guide: nn.Module) -> nn.Module:
        count_steps(ps.fit(model, guide, (x, y), num_steps=steps, progress=False))
        return guide

    guide = make_guide(title, model, fit, x)
    start = time.process_time()
    fit(guide)
    milliseconds = 1e3 * (time.process_time() - start) / steps
    prediction = ps.predict(model, guide, make_grid(), num_samples=draws)
    data = ps.to_inference_data(model, guide, x, y, num_samples=draws)
    data.to_netcdf(output / f"{file_name(title)}.nc")
    with torch.no_grad():
        objective = ps.StructuredELBO(num_particles=20 if smoke else 500)
        elbo = float(objective.terms(model, guide, x, y).elbo)
    return Regression(count_parameters(guide), elbo, milliseconds, prediction)


def show_regression(
    fits: dict[str, Future[Regression]], output: Path, smoke: bool, progress: Progress
) -> None:
    from pyro_structvi.metrics import PredictiveDistance  # the processes do without

    progress.write("Regression, 100 examples, a net of 50 tanh units; the reference is NUTS.")
    model, x, y = make_regression()
    grid = make_grid()
    with ThreadPoolExecutor(1) as thread:
        sampled = thread.submit(sample_reference, model, x, y, smoke)
        ((_, nuts),) = as_they_come({"NUTS": sampled}, progress)
    progress.write(
        f"NUTS: {nuts.num_chains} chains of {len(nuts['net.0.weight']) // nuts.num_chains} draws, "
        f"R-hat of the function at the data {nuts.r_hat:.3f}, {nuts.divergences} divergences.\n"
    )
    ps.to_inference_data(model, nuts, x, y).to_netcdf(output / "nuts.nc")
    predictions = {"NUTS": ps.predict(model, nuts, grid)}

    progress.write("Distance of the function's posterior to that of NUTS: difference of means,")
    progress.write("ratio of standard deviations, 1-Wasserstein distance. Milliseconds are of CPU.")
    table = Table(progress, ["guide", "parameters", "ELBO", "ms/step", *REGIONS], fits, 15)
    between: dict[str, PredictiveDistance] = {}
    for title, found in as_they_come(fits, progress):
        predictions[title] = found.prediction
        distances = distances_by_region(
            grid, found.prediction.functions, predictions["NUTS"].functions
        )
        between[title] = distances["between"]
        elbo = "-" if title in NO_BOUND else f"{found.elbo:.1f}"
        cells = [" ".join(f"{number:.2f}" for number in astuple(d)) for d in distances.values()]
        table.add([title, str(found.parameters), elbo, f"{found.milliseconds:.2f}", *cells])
    progress.write(reading_of_distances(between))
    ordered = {title: predictions[title] for title in ["NUTS", *fits]}
    draw_regressions(ordered, grid, x, y, output / "regression.png")
    progress.write(f"The figure is {output / 'regression.png'}; draws for ArviZ are beside it.\n")


def draw_regressions(
    predictions: dict[str, Any], grid: Tensor, x: Tensor, y: Tensor, path: Path
) -> None:
    """Draw a panel for each posterior: mean, up to three standard deviations, data and truth."""
    from pyro_structvi.plots import plot_band  # the processes do without
    from pyro_structvi.plots.figures import figure_of, make_panels

    rows = -(-len(predictions) // 4)
    panels = make_panels(rows, 4, 12.8, 2.6 * rows, sharex=True, sharey=True)
    given = {"data_x": x, "data_y": y, "truth": true_function(grid), "label": None}
    for panel, (title, own) in zip(panels, predictions.items(), strict=False):
        plot_band(grid, own.mean, own.variance.sqrt(), panel, **given)
        panel.set(title=title, ylim=(-3, 3))
    for panel in panels[len(predictions) :]:
        panel.set_axis_off()
    figure_of(panels[0]).savefig(path, dpi=150)


def sample_reference(model: Any, x: Tensor, y: Tensor, smoke: bool) -> Any:
    import numpyro  # the processes do without

    from pyro_structvi import reference

    numpyro.set_host_device_count(4)  # so that the four chains run side by side
    warmup, draws = (25, 20) if smoke else (NUTS_WARMUP, NUTS_DRAWS)
    with warnings.catch_warnings():
        for kind in (reference.DivergenceWarning, reference.NotMixedWarning):
            warnings.simplefilter("ignore", kind)  # both are printed
        return reference.nuts(model, x, y, num_warmup=warmup, num_samples=draws, progress=False)


def reading_of_distances(between: dict[str, Any]) -> str:
    distances = {title: distance.wasserstein for title, distance in between.items()}
    first, last = (
        min(distances, key=distances.__getitem__),
        max(distances, key=distances.__getitem__),
    )
    return (
        f"Between the clusters, where no data hold the function, {first} is closest to NUTS "
        f"(Wasserstein distance {distances[first]:.2f}) and {last} farthest "
        f"({distances[last]:.2f}); a ratio of standard deviations below 1 is too sure."
    )


def make_guide(
    title: str, model: Any, fit: Callable[[nn.Module], nn.Module], x: Tensor
) -> nn.Module:
    """Make a guide; that of a subnetwork is chosen by Laplace variances around a fitted MAP."""
    if title != SUBNETWORK:
        return METHODS[title](model)
    best = fit(METHODS["MAP"](model))
    variances = element_scores.laplace_variances(model, best, x, num_samples=10)
    return ps.SubnetworkGuide(model, element_scores.largest(variances, size=50), best)


def make_regression(size: int = 100) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    left, right = -1 + 0.3 * torch.rand(size // 2, 1), 0.5 + 0.5 * torch.rand(size // 2, 1)
    x = torch.cat([left, right])
    y = true_function(x) + 0.1 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    bayes_net = ps.bayesianize(net, prior=ps.FanIn(scale=4.0, vector_scale=1.0))
    return ps.Regressor(bayes_net, num_data=size, noise_scale=0.1), x, y


def make_grid() -> Tensor:
    return torch.linspace(-2, 2, 201).unsqueeze(-1)


def true_function(x: Tensor) -> Tensor:
    return torch.cos(4 * x + 0.8)


def distances_by_region(grid: Tensor, functions: Tensor, exact: Tensor) -> dict[str, Any]:
    from pyro_structvi.metrics import predictive_distance  # the processes do without

    distances = {}
    for name, intervals in REGIONS.items():
        inside = torch.zeros(len(grid), dtype=torch.bool)
        for low, high in intervals:
            inside |= ((grid >= low) & (grid <= high)).flatten()
        distances[name] = predictive_distance(functions[:, inside], exact[:, inside])
    return distances


# ---- part 2: digits ------------------------------------------------------------------------------


class Digits(NamedTuple):
    """What a guide reaches on the digits."""

    parameters: int
    probabilities: Tensor
    labels: Tensor


def fit_digits(title: str, smoke: bool) -> Digits:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target, dtype=torch.long)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    # Of the prior scales 1.4, 3, 5 and 8, this one has the largest ELBO.
    layers = {"*": LAYERS[title][0]} if title in LAYERS else None
    model = ps.Classifier(ps.bayesianize(net, ps.FanIn(scale=5.0), layers=layers))
    epochs = 1 if smoke else DIGITS_EPOCHS

    def fit(guide: nn.Module) -> nn.Module:
        history = ps.fit(
            *(model, guide, (x[train], y[train])),
            num_epochs=epochs,
            batch_size=128,
            kl_weight=ps.LinearAnnealing(STEPS_PER_EPOCH * epochs // 2),
            progress=False,
        )
        count_steps(history)
        return guide

    is_layer = title in LAYERS
    guide = LAYERS[title][1](model) if is_layer else make_guide(title, model, fit, x[train])
    fit(guide)
    prediction = ps.predict(model, guide, x[test], num_samples=100)
    return Digits(count_parameters(guide, model), prediction.mean, y[test])


def show_digits(fits: dict[str, Future[Digits]], progress: Progress) -> None:
    from pyro_structvi.metrics import classification_scores

    progress.write(f"Digits: {NUM_TEST} images are for the test.")
    header = ["guide", "parameters", "accuracy", "NLL (nats)", "calibration error"]
    table, scores = Table(progress, header, fits), {}
    for title, found in as_they_come(fits, progress):
        own = scores[title] = classification_scores(found.probabilities, found.labels)
        cells = [f"{own.accuracy:.3f}", f"{own.nll:.3f}", f"{own.calibration_error:.3f}"]
        table.add([title, str(found.parameters), *cells])
    best = min(scores, key=lambda title: scores[title].nll)
    accuracy = scores[best].accuracy
    error = (accuracy * (1 - accuracy) / len(found.labels)) ** 0.5
    progress.write(
        f"{best} gives the test labels the most probability ({scores[best].nll:.3f} nats an image); "
        f"accuracies that differ by less than two standard errors, {2 * error:.3f}, are alike."
    )


# ---- both parts ----------------------------------------------------------------------------------


def count_parameters(*roots: nn.Module) -> int:
    return sum(parameter.numel() for root in roots for parameter in root.parameters())


def file_name(title: str) -> str:
    return title.replace(",", "").replace(" = ", "").replace(" ", "_").replace("-", "_")


if __name__ == "__main__":
    main()
