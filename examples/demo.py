"""The main job: posteriors of a small regression net beside NUTS, and handwritten digits.

Part 1 is the regression of Ritter et al. (2021), section 4.1: two clusters of inputs, a net with 50
tanh units, whose exact posterior NUTS can sample. Part 2 classifies the 8 x 8 digits that ship with
scikit-learn. Six guides are compared; ``--all`` takes every one.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpyro
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import pyro_structvi as ps
from pyro_structvi import reference, subnetwork
from pyro_structvi.families import Dropout, PointEstimate
from pyro_structvi.infer import CosineDecay
from pyro_structvi.metrics import PredictiveDistance, classification_scores, predictive_distance
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

# What is run unless every guide is asked for.
SIX = [
    *("mean field", "k-tied, k = 2", "rowwise, joined", "low rank, full diagonal"),
    *("FFG-U", "Ensemble-W"),
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

NUTS_DRAWS = 200  # of each of four chains; with 250 to warm up, R-hat is below 1.01
REGRESSION_STEPS, DIGITS_EPOCHS, STEPS_PER_EPOCH = 6_000, 250, 12
NUTS_STEPS = 15_000  # what NUTS counts as in the progress: it takes as long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for files")
    parser.add_argument("--all", action="store_true", help="every guide, not six")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps only, to see that it runs"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    numpyro.set_host_device_count(4)  # so that the four chains run side by side
    torch.manual_seed(0)
    torch.set_num_threads(1)  # nets this small only lose by more
    every = [*METHODS, SUBNETWORK]
    regression = every if options.all else SIX
    digits = [*every, *LAYERS] if options.all else SIX
    digits = [title for title in digits if title not in REGRESSION_ONLY]
    steps = [
        NUTS_STEPS,
        len(regression) * REGRESSION_STEPS,
        len(digits) * DIGITS_EPOCHS * STEPS_PER_EPOCH,
    ]
    job = Job(options.smoke, sum(steps))
    run_regression(regression, options.output, job)
    run_digits(digits, job)
    job.close()


# ---- part 1: regression --------------------------------------------------------------------------


def run_regression(titles: Sequence[str], output: Path, job: "Job") -> None:
    x, y = make_regression()
    grid = torch.linspace(-2, 2, 201).unsqueeze(-1)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    bayes_net = ps.bayesianize(net, prior=ps.FanIn(scale=4.0, vector_scale=1.0))
    model = ps.Regressor(bayes_net, num_data=len(x), noise_scale=0.1)

    job.write("Regression, 100 examples, a net of 50 tanh units; the reference is NUTS.")
    draws = 20 if job.is_smoke else NUTS_DRAWS
    with job.part("NUTS, four chains", NUTS_STEPS):
        nuts = reference.nuts(
            model, x, y, num_warmup=draws * 5 // 4, num_samples=draws, progress=False
        )
    job.write(
        f"NUTS: {nuts.num_chains} chains x {draws} draws, R-hat of the function at the data "
        f"{nuts.r_hat:.3f}, {nuts.divergences} divergences.\n"
    )
    predictions = {"NUTS": ps.predict(model, nuts, grid)}
    ps.to_inference_data(model, nuts, x, y).to_netcdf(output / "nuts.nc")

    job.write("Distance of the function's posterior to that of NUTS: difference of means, ratio of")
    job.write("standard deviations, 1-Wasserstein distance.")
    table = Table(job, ["guide", "parameters", "ELBO", "ms/step", *REGIONS], titles)
    guides: dict[str, nn.Module] = {}
    between: dict[str, PredictiveDistance] = {}
    for title in titles:
        torch.manual_seed(0)  # so that no row depends on another
        guides[title] = guide = make_guide(title, model, guides, x)
        steps = 20 if job.is_smoke else REGRESSION_STEPS
        start = time.perf_counter()
        with job.part(f"Regression, {title}", REGRESSION_STEPS) as step:
            ps.fit(
                *(model, guide, (x, y)),
                num_steps=steps,
                lr=0.02,
                lr_schedule=CosineDecay(steps),
                callbacks=[step],
                progress=False,
            )
        milliseconds = 1e3 * (time.perf_counter() - start) / steps
        predictions[title] = ps.predict(model, guide, grid, num_samples=draws * 4)
        ps.to_inference_data(model, guide, x, y, num_samples=4 * draws).to_netcdf(
            output / f"{file_name(title)}.nc"
        )
        with torch.no_grad():
            objective = ps.StructuredELBO(num_particles=20 if job.is_smoke else 500)
            bound = objective.terms(model, guide, x, y).elbo
        distances = distances_by_region(
            grid, predictions[title].functions, predictions["NUTS"].functions
        )
        between[title] = distances["between"]
        elbo = "-" if title in NO_BOUND else f"{bound:.1f}"
        cells = [" ".join(f"{number:.2f}" for number in astuple(d)) for d in distances.values()]
        table.add([title, count_parameters(guide), elbo, f"{milliseconds:.2f}", *cells])
    job.write(reading_of_distances(between))
    figure = plot_regressions(predictions, grid, x, y, truth=true_function(grid), limits=(-3, 3))
    figure.savefig(output / "regression.png", dpi=150)
    job.write(f"The figure is {output / 'regression.png'}; draws for ArviZ are beside it.\n")


def reading_of_distances(between: dict[str, PredictiveDistance]) -> str:
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


def count_parameters(*roots: nn.Module) -> str:
    return str(sum(parameter.numel() for root in roots for parameter in root.parameters()))


def file_name(title: str) -> str:
    return title.replace(",", "").replace(" = ", "").replace(" ", "_").replace("-", "_")


def distances_by_region(
    grid: Tensor, functions: Tensor, exact: Tensor
) -> dict[str, PredictiveDistance]:
    distances = {}
    for name, intervals in REGIONS.items():
        inside = torch.zeros(len(grid), dtype=torch.bool)
        for low, high in intervals:
            inside |= ((grid >= low) & (grid <= high)).flatten()
        distances[name] = predictive_distance(functions[:, inside], exact[:, inside])
    return distances


# ---- part 2: digits ------------------------------------------------------------------------------


def run_digits(titles: Sequence[str], job: "Job") -> None:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(x))
    test, train = order[:360], order[360:]
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    # Of the prior scales 1.4, 3, 5 and 8, this one has the largest ELBO.
    prior = ps.FanIn(scale=5.0)
    model = ps.Classifier(ps.bayesianize(net, prior), num_data=len(train))

    job.write(f"Digits, {len(train)} images to learn from and {len(test)} to test on.")
    header = ["guide", "parameters", "accuracy", "NLL (nats)", "calibration error"]
    table = Table(job, header, titles)
    guides: dict[str, nn.Module] = {}
    scores = {}
    for title in titles:
        torch.manual_seed(0)
        if title in LAYERS:
            layer, make = LAYERS[title]
            bayes_net = ps.bayesianize(net, prior, layers={"*": layer})
            model = ps.Classifier(bayes_net, num_data=len(train))
            guide = make(model)
        else:
            guide = make_guide(title, model, guides, x[train])
        guides[title] = guide
        epochs = 1 if job.is_smoke else DIGITS_EPOCHS
        with job.part(f"Digits, {title}", DIGITS_EPOCHS * STEPS_PER_EPOCH) as step:
            ps.fit(
                *(model, guide, (x[train], y[train])),
                num_epochs=epochs,
                batch_size=128,
                lr=1e-2,
                lr_schedule=CosineDecay(STEPS_PER_EPOCH * epochs),
                kl_weight=ps.LinearAnnealing(STEPS_PER_EPOCH * epochs // 2),
                callbacks=[step],
                progress=False,
            )
        prediction = ps.predict(model, guide, x[test], num_samples=100)
        own = scores[title] = classification_scores(prediction.mean, y[test])
        cells = [f"{own.accuracy:.3f}", f"{own.nll:.3f}", f"{own.calibration_error:.3f}"]
        table.add([title, count_parameters(guide, model), *cells])
    best = min(scores, key=lambda title: scores[title].nll)
    accuracy = scores[best].accuracy
    error = (accuracy * (1 - accuracy) / len(test)) ** 0.5
    job.write(
        f"{best} gives the test labels the most probability ({scores[best].nll:.3f} nats an image); "
        f"accuracies that differ by less than two standard errors, {2 * error:.3f}, are alike."
    )


# ---- what is printed -----------------------------------------------------------------------------


class Job:
    """Prints lines above one line of progress; without a terminal, the progress every few seconds.

    Args:
        is_smoke: Whether to take a few steps only.
        steps: How many there are in full size.
    """

    EVERY = 5.0  # seconds

    def __init__(self, is_smoke: bool, steps: int) -> None:
        self.is_smoke = is_smoke
        self._bar = tqdm(total=steps, unit=" steps", leave=False, disable=not sys.stderr.isatty())
        self._done, self._steps = 0, steps
        self._start = self._last = time.monotonic()

    def write(self, line: str) -> None:
        """Print a line above the progress."""
        tqdm.write(line, sys.stdout)
        sys.stdout.flush()

    @contextmanager
    def part(self, title: str, steps: int) -> Iterator[Callable[[Any], None]]:
        """Show the progress of a part; yield what counts one of its steps."""
        begin = self._done
        self._bar.set_description(title)
        self._show(title)

        def step(history: Any) -> None:
            if not self.is_smoke:
                self._done += 1
                self._bar.update()
            self._show(title)

        yield step
        self._bar.update(begin + steps - self._done)
        self._done = begin + steps

    def _show(self, title: str) -> None:
        now = time.monotonic()
        if self._bar.disable and now - self._last > self.EVERY:
            self._last = now
            share = self._done / self._steps
            print(f"{share:4.0%}  {now - self._start:3.0f} s  {title}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Say how long it took."""
        self._bar.close()
        self.write(f"\nThat took {time.monotonic() - self._start:.0f} s.")


class Table:
    """Prints rows as they come, in columns as wide as what is known to come."""

    def __init__(self, job: Job, header: Sequence[str], titles: Iterable[str]) -> None:
        self._job = job
        self._widths = [max(map(len, titles)), *(max(len(cell), 10) for cell in header[1:])]
        self._widths = [
            max(width, len("-0.00 0.00 0.00")) if name in REGIONS else width
            for name, width in zip(header, self._widths, strict=True)
        ]
        self.add(header)
        self.add(["-" * width for width in self._widths])

    def add(self, row: Sequence[str]) -> None:
        """Print a row."""
        cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
        self._job.write("  ".join(cells).rstrip())


if __name__ == "__main__":
    main()
