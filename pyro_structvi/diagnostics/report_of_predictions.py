"""What a report says of predictions: scores, calibration, and figures over one or two inputs."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._checks import naming
from pyro_structvi.diagnostics.coverage import expected_coverage
from pyro_structvi.diagnostics.report_data import Fitted
from pyro_structvi.diagnostics.report_page import Part, Section, Table, make_ax, picture
from pyro_structvi.metrics import (
    binary_scores,
    classification_scores,
    max_probability_score,
    regression_scores,
    risk_coverage,
)
from pyro_structvi.plots import (
    plot_band,
    plot_coverage,
    plot_decision,
    plot_reliability,
    plot_risk_coverage,
)
from pyro_structvi.posterior.prediction import Prediction

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
IN_TABLE = (0.5, 0.8, 0.9, 0.95)
GRID = 200  # inputs of a band
SIDE = 50  # inputs along each side of a plane
BEYOND = 0.25  # how far grids reach beyond the data, as a share of their range
POINTS = 500  # of the data, at most, that a figure shows

MEANINGS = {
    "rmse": (
        "RMSE",
        "root of the mean squared error of the predictive mean, in the targets' units",
    ),
    "log_density": (
        "log density",
        "mean log density of an example's targets, in nats; the higher the better",
    ),
    "crps": (
        "CRPS",
        "continuous ranked probability score, in the targets' units; the lower the better",
    ),
    "coverage": ("coverage", "share of the targets in their 95% intervals"),
    "width": ("width", "mean width of the 95% intervals, in the targets' units"),
    "accuracy": (
        "accuracy",
        "share of the examples, or labels, whose most probable value is right",
    ),
    "nll": (
        "negative log probability",
        "mean negative log probability of what was observed, in nats; the lower the better",
    ),
    "calibration_error": (
        "calibration error",
        "mean difference of confidence and accuracy, over 15 bins",
    ),
    "brier": ("Brier score", "mean squared difference of the probabilities from what was observed"),
    "area": (
        "area under the curve",
        "mean share of errors over all shares of answered examples; the lower the better",
    ),
    "excess_area": (
        "excess area",
        "what that area has beyond the one of the best order of the examples",
    ),
}
OF_NUMBERS = (
    "The observed coverage should be the level, give or take two standard errors: below it "
    "predictions are too sure, above it not sure enough. The right coverage alone is no praise, so "
    "compare widths, log densities or the continuous ranked probability score between guides."
)
OF_CLASSES = (
    "In the reliability diagram a bar that ends below its black mark is too sure. The curve of risk "
    "and coverage says how many errors are left when only the surest examples are answered: it should "
    "rise late. Compare the negative log probability between guides, which counts errors and wrong "
    "confidence."
)


def predictions(fitted: Fitted) -> Section:
    """Return the section of predictions, at test data where there are some."""
    scored = fitted.test or fitted.train
    with naming(scored.name, (*scored.args, scored.y)):
        prediction = fitted.predict(scored.args, y=scored.y)
    note = f"Scores at {len(scored.y):,} examples of the test data."
    if fitted.test is None:
        note = (
            f"Scores at the {len(scored.y):,} examples that the guide was fitted to, where every score "
            "looks better than at new ones: pass `test_data`."
        )
    reading, parts = _read(fitted, prediction, scored.y)
    return Section("Predictions", reading, [note, *parts])


def _read(fitted: Fitted, prediction: Prediction, y: Tensor) -> tuple[str, list[Part]]:
    """Return how to read the predictions, and the parts, by what is predicted."""
    mean, entropy = prediction.mean, prediction.entropy
    if entropy is not None and entropy.shape == y.shape == mean.shape[:1] and mean.dim() == 2:
        return OF_CLASSES, [*_of_classes(prediction, y), *_planes(fitted, prediction)]
    if entropy is not None and entropy.shape == y.shape == mean.shape:
        return OF_CLASSES, [*_of_labels(prediction, y), *_planes(fitted, prediction)]
    if mean.shape == y.shape and prediction.likelihood is not None:
        return OF_NUMBERS, [*_of_numbers(prediction, y.to(mean)), *_bands(fitted, y)]
    left_out = (
        "Other scores are left out: they are for numbers, for one class of each example and for labels, "
        "whose likelihood consists of tensors with an entry for each example."
    )
    return "The higher the log density, the better.", [_log_density(prediction), left_out]


def _log_density(prediction: Prediction) -> Table:
    assert prediction.log_density is not None
    return _scores("Scores", {"log_density": float(prediction.log_density.double().mean())})


def _scores(title: str, scores: dict[str, float]) -> Table:
    rows = [(MEANINGS[name][0], value, MEANINGS[name][1]) for name, value in scores.items()]
    return Table(title, ("score", "value", "meaning"), rows)


# ---- numbers -------------------------------------------------------------------------------------


def _of_numbers(prediction: Prediction, y: Tensor) -> Iterator[Part]:
    try:
        scores, coverage = (
            regression_scores(prediction, y),
            expected_coverage(prediction, y, LEVELS),
        )
    except ValueError as error:  # of observations without order
        yield _log_density(prediction)
        yield f"Other scores are left out: {error}"
        return
    yield _scores("Scores", asdict(scores))
    rows = [
        (f"{level:.0%}", coverage[level].observed, coverage[level].standard_error)
        for level in IN_TABLE
    ]
    yield Table("Coverage of intervals", ("level", "observed", "standard error"), rows)
    observed = [each.observed for each in coverage.values()]
    yield picture(
        "Observed coverage of the predictive intervals over their level.",
        plot_coverage(LEVELS, observed, make_ax(), "observed", num_examples=len(y)),
    )


def _bands(fitted: Fitted, y: Tensor) -> Iterator[Part]:
    """Yield a band about the function, where there is one input and one target."""
    shown = fitted.train.plane(1, POINTS)
    if shown is None or y.numel() != len(y):
        return
    x = fitted.train.args[0]
    grid = _grid(x, GRID)
    prediction = fitted.predict((grid.reshape(-1, *x.shape[1:]),))
    ends = [prediction.interval(level) for level in (0.95, 0.5)]
    lower, upper = (
        torch.stack([each.flatten() for each in own]) for own in zip(*ends, strict=True)
    )
    points: dict[str, Any] = {"data_x": shown[0].flatten(), "data_y": shown[1].flatten()}
    mean = prediction.mean.flatten()
    yield picture(
        "Predictive mean with central intervals of 50% and 95%, and data that the guide was fitted to.",
        plot_band(grid, mean, ax=make_ax(), lower=lower, upper=upper, **points),
    )


def _grid(values: Tensor, size: int) -> Tensor:
    """Return inputs from below the least value to above the largest."""
    low, high = values.min(), values.max()
    beyond = BEYOND * (high - low).clamp_min(torch.finfo(values.dtype).eps)
    steps = torch.linspace(0, 1, size, dtype=values.dtype, device=values.device)
    return low - beyond + (high - low + 2 * beyond) * steps


# ---- classes -------------------------------------------------------------------------------------


def _of_classes(prediction: Prediction, y: Tensor) -> Iterator[Part]:
    yield _scores("Scores", asdict(classification_scores(prediction.mean, y)))
    yield from _calibration(prediction.mean, y)


def _of_labels(prediction: Prediction, y: Tensor) -> Iterator[Part]:
    """Yield scores of labels, and their calibration, each label as an example of two classes."""
    yield _scores("Scores", asdict(binary_scores(prediction.mean, y)))
    share = prediction.mean.flatten()
    yield from _calibration(torch.stack([1 - share, share], -1), y.flatten().long())


def _calibration(probabilities: Tensor, y: Tensor) -> Iterator[Part]:
    errors = (probabilities.argmax(-1) != y).double()
    curve = risk_coverage(max_probability_score(probabilities), errors)
    areas = {"area": curve.area, "excess_area": curve.excess_area}
    yield _scores("When the least sure examples are not answered", areas)
    yield picture(
        "Accuracy of examples that are predicted equally surely.",
        plot_reliability(probabilities, y, ax=make_ax()),
    )
    yield picture(
        "Share of errors among the surest examples, over how many of them are answered.",
        plot_risk_coverage(curve.coverage, curve.risk, make_ax()),
    )


def _planes(fitted: Fitted, prediction: Prediction) -> Iterator[Part]:
    """Yield predictions over the plane, where there are two inputs."""
    shown = fitted.train.plane(2, POINTS)
    assert prediction.entropy is not None
    if shown is None or prediction.entropy[0].numel() > 1:  # of several labels
        return
    x = fitted.train.args[0]
    first, second = _grid(x[:, 0], SIDE), _grid(x[:, 1], SIDE)
    columns, rows = torch.meshgrid(first, second, indexing="xy")
    found = fitted.predict((torch.stack([columns.flatten(), rows.flatten()], -1),))
    is_binary = found.mean.shape[-1] == 2 or found.mean[0].numel() == 1
    certainty = found.mean.reshape(SIDE**2, -1)[:, -1] if is_binary else found.entropy
    words = (
        ("probability of class 1", "Probability") if is_binary else ("entropy (nats)", "Entropy")
    )
    data = shown[0], shown[1].flatten().long()
    for values, label, name in (
        (certainty, *words),
        (found.mutual_information, "mutual information (nats)", "Mutual information"),
    ):
        assert values is not None
        heights = values.reshape(SIDE, SIDE)
        yield picture(
            f"{name} over the plane of inputs, and data that the guide was fitted to.",
            plot_decision(first, second, heights, *data, ax=make_ax(5.2, 3.2), label=label),
        )
