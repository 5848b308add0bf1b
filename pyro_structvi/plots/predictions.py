"""Figures of predictions: bands, reliability of class probabilities, coverage of intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_structvi._checks import Count, checked
from pyro_structvi.metrics.inputs import checked_classes, checked_probabilities
from pyro_structvi.metrics.scores import confidence_bins
from pyro_structvi.plots.figures import (
    BLACK,
    BLUE,
    VERMILION,
    Array,
    Matrix,
    Values,
    add_labels,
    add_legend,
    draw_diagonal,
    make_axes,
    next_style,
    real_array,
    same_length,
)

DEPTH = 0.25  # height of the tallest bar below the axis, in units of the vertical axis


@checked
def plot_band(
    x: Values,
    mean: Values,
    scale: Values | None = None,
    ax: Axes | None = None,
    widths: Sequence[float] = (1.0, 2.0, 3.0),
    *,
    lower: Values | None = None,
    upper: Values | None = None,
    data_x: Values | None = None,
    data_y: Values | None = None,
    truth: Values | None = None,
    label: str | None = "mean",
) -> Axes:
    r"""Draw a function of one input with bands, data and truth.

    The bands are :math:`m(x) \pm k \, s(x)` for each width k, or from ``lower`` to ``upper``, such as
    quantiles.

    Args:
        x: Inputs ``(N,)`` or ``(N, 1)``, ascending; other arguments may have a last dimension of 1, too.
        mean: The function m at the inputs ``(N,)``.
        scale: Standard deviations s at the inputs ``(N,)``; None with ``lower`` and ``upper``.
        ax: Axes of the drawing; a new figure when None.
        widths: Half-widths of the bands in standard deviations.
        lower: Lower ends of one band ``(N,)``.
        upper: Its upper ends.
        data_x: Inputs of the data ``(D,)``.
        data_y: Targets of the data ``(D,)``.
        truth: The function that made the data, at ``x``.
        label: Name of the function in the legend; no legend when None.

    Raises:
        ValueError: If sizes differ, ``x`` is not ascending, a standard deviation is negative, or bands
            are given twice or not at all.

    Example:
        >>> ax = plot_band([0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.1, 0.2, 0.3], widths=(1, 2))
        >>> len(ax.collections)
        2
    """
    lines = {"x": x, "mean": mean, "scale": scale, "lower": lower, "upper": upper, "truth": truth}
    found = same_length(lines)
    inputs, means = found["x"], found["mean"]
    if (np.diff(inputs) < 0).any():
        raise ValueError(
            "`x` must be ascending, since lines join successive points, but is not. Sort all arguments "
            "by `x.argsort()`."
        )
    bands = _bands(found, widths)
    if (data_x is None) != (data_y is None):
        raise ValueError("`data_x` and `data_y` must be given together, or neither of them.")
    points = {} if data_x is None else same_length({"data_x": data_x, "data_y": data_y})
    ax = make_axes(ax)
    style = next_style(ax, taken=[BLACK, VERMILION])  # those of truth and data
    for low, high in bands:
        ax.fill_between(inputs, low, high, color=style["color"], alpha=0.2, linewidth=0)
    ax.plot(inputs, means, label=label, **style)
    if "truth" in found:
        ax.plot(inputs, found["truth"], color=BLACK, linewidth=0.8, label="truth")
    if points:
        ax.scatter(points["data_x"], points["data_y"], s=6, color=VERMILION, zorder=3, label="data")
    add_labels(ax, "input", "target")
    if label is not None:
        add_legend(ax)
    return ax


def _bands(lines: Mapping[str, Array], widths: Sequence[float]) -> list[tuple[Array, Array]]:
    """Return the lower and upper ends of each band."""
    given = {"scale", "lower", "upper"} & lines.keys()
    if given == {"scale"}:
        mean, scale = lines["mean"], lines["scale"]
        if (scale < 0).any():
            raise ValueError(
                "`scale` must be a standard deviation, so at least 0, but has an entry below 0."
            )
        if not widths or not all(0 < width < np.inf for width in widths):
            raise ValueError("`widths` must hold at least one number, all positive and finite.")
        return [(mean - width * scale, mean + width * scale) for width in widths]
    if given != {"lower", "upper"}:
        raise ValueError(
            "Either `scale` or both `lower` and `upper` must be given: standard deviations, or the "
            "ends of bands."
        )
    if (lines["lower"] > lines["upper"]).any():
        raise ValueError("`lower` must be at most `upper` everywhere, but is not.")
    return [(lines["lower"], lines["upper"])]


@checked
def plot_reliability(
    probabilities: Matrix, y: Values, num_bins: Count = 15, ax: Axes | None = None
) -> Axes:
    r"""Draw a reliability diagram: the accuracy of examples by confidence.

    Bin m of M holds the examples whose confidence :math:`\max_k p_{nk}` is in ((m - 1) / M, m / M]. Its
    bar is their accuracy, and its black mark their average confidence: a bar below the mark is
    overconfident. Bars below the axis are shares of all examples.

    Args:
        probabilities: Predicted class probabilities ``(N, classes)``, averaged over draws.
        y: Right classes ``(N,)``, whole numbers.
        num_bins: The number M of bins.
        ax: Axes of the drawing; a new figure when None.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> import torch
        >>> ax = plot_reliability(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), [0, 0])
        >>> [float(bar.get_height()) for bar in ax.containers[0]]
        [0.0, 1.0]

    References:
        Guo et al. (2017), "On calibration of modern neural networks", section 2.
    """
    given = torch.as_tensor(real_array("probabilities", probabilities, dim=2))
    if isinstance(probabilities, Tensor) and probabilities.is_floating_point():
        given = probabilities  # whose sums may be rounded in half precision
    known = checked_probabilities("probabilities", given)
    of_examples = y if isinstance(y, Tensor) else torch.as_tensor(np.asarray(y))
    classes = checked_classes("y", of_examples, known)
    bins = confidence_bins(known, classes, num_bins)
    filled, share, accuracy, marks = (each.cpu().numpy() for each in bins)
    ax = make_axes(ax, 5.6, 4.0)
    left, width = filled / num_bins, 1 / num_bins
    bars: dict[str, Any] = {"width": width, "align": "edge", "edgecolor": "white"}
    ax.bar(left, accuracy, color=BLUE, label="accuracy", **bars)
    tallest = f"share of examples,\ntallest {share.max():.0%}"
    ax.bar(left, -DEPTH * share / share.max(), color="0.75", label=tallest, **bars)
    ax.hlines(marks, left, left + width, color=BLACK, linewidth=2, label="mean confidence")
    ax.axhline(0, color=BLACK, linewidth=0.8)
    _draw_calibrated(ax)
    ax.set_ylim(-1.15 * DEPTH, 1.02)
    add_labels(ax, "confidence", "accuracy")
    add_legend(ax)
    return ax


def _draw_calibrated(ax: Axes) -> None:
    draw_diagonal(ax, "calibrated")
    ticks = np.linspace(0, 1, 6)
    ax.set(xticks=ticks, yticks=ticks, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))


@checked
def plot_coverage(
    levels: Values,
    coverage: Values | Mapping[str, Values],
    ax: Axes | None = None,
    label: str | None = None,
    num_examples: Count | None = None,
) -> Axes:
    r"""Draw the observed coverage of predictive intervals over their levels.

    A curve below the diagonal means intervals that are too narrow. The grey band has two standard errors
    of correct intervals, :math:`\sqrt{l (1 - l) / N}`, to either side.

    Args:
        levels: Probabilities of the intervals ``(L,)``, from 0 to 1, in any order.
        coverage: Shares of targets inside ``(L,)``, from 0 to 1; or several curves, by label.
        ax: Axes of the drawing; a new figure when None.
        label: Name of a single curve in the legend.
        num_examples: The number N of independent examples, for the grey band; none when None.

    Raises:
        ValueError: If sizes differ, or a share is not between 0 and 1.

    Example:
        >>> ax = plot_coverage([0.5, 0.9], [0.4, 0.8], num_examples=100)
        >>> ax.get_ylabel()
        'observed coverage'

    References:
        Kuleshov, Fenner and Ermon (2018), "Accurate uncertainties for deep learning using calibrated
        regression", section 3.
    """
    curves: dict[str | None, tuple[str, Values]] = {}
    if not isinstance(coverage, Mapping):
        curves[label] = "coverage", coverage
    elif label is not None:
        raise ValueError(
            "`label` must be None where `coverage` is a mapping: its keys are the labels."
        )
    elif not coverage:
        raise ValueError("`coverage` must hold at least one entry, but is empty.")
    else:
        curves |= {key: (f"coverage[{key!r}]", each) for key, each in coverage.items()}
    found = same_length({"levels": levels, **dict(curves.values())})
    for name, array in found.items():
        if (array < 0).any() or (array > 1).any():
            raise ValueError(
                f"`{name}` must hold shares from 0 to 1, but has an entry outside. Divide "
                "percentages by 100."
            )
    ax = make_axes(ax, 5.2, 3.8)
    if num_examples is not None:
        line = np.linspace(0, 1, 101)
        error = 2 * np.sqrt(line * (1 - line) / num_examples)
        low, high = np.clip(line - error, 0, 1), np.clip(line + error, 0, 1)
        name = f"2 standard errors\nof {num_examples} examples"
        ax.fill_between(line, low, high, color="0.85", linewidth=0, label=name)
    _draw_calibrated(ax)
    order = found["levels"].argsort(kind="stable")
    for title, (name, _) in curves.items():
        style = next_style(ax) | {"marker": "o", "markersize": 4}
        ax.plot(found["levels"][order], found[name][order], label=title, **style)
    add_labels(ax, "expected coverage", "observed coverage")
    add_legend(ax)
    return ax
