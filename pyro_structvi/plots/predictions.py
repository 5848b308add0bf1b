"""Figures of predictions: reliability, coverage, risk, decisions, histograms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_structvi._checks import Count, brief, checked, shape_text
from pyro_structvi.plots.figures import (
    BLACK,
    BLUE,
    GREY,
    MARKERS,
    SEQUENTIAL,
    Array,
    Matrix,
    Values,
    add_colour_bar,
    add_labels,
    add_legend,
    by_label,
    check_as_many,
    check_not_negative,
    check_shares,
    class_array,
    curve_style,
    make_axes,
    real_array,
)

# The tallest bar of the shares below the axis, in the units of the vertical axis.
DEPTH = 0.25
TOLERANCE = 1e-3


@checked
def plot_reliability(
    probabilities: Matrix, y: Values, num_bins: Count = 15, ax: Axes | None = None
) -> Axes:
    r"""Draw a reliability diagram: the accuracy of examples that are predicted equally surely.

    With the confidence :math:`c_n = \max_k p_{nk}`, bin m of M holds the examples with
    :math:`(m - 1) / M < c_n \le m / M`. Its bar is the share of them whose most probable class is
    right, and its black mark is the average of their confidences: a bar that ends below the mark is
    too sure. The bars below the axis are the shares of all examples.

    Args:
        probabilities: Predicted class probabilities ``(N, classes)``, averaged over draws.
        y: Right classes ``(N,)``, whole numbers.
        num_bins: The number M of bins.
        ax: Where to draw; a new figure when None.

    Returns:
        The axes.

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
    each = real_array("probabilities", probabilities, dim=2)
    _check_simplex(each)
    classes = class_array("y", y, each.shape[1])
    if classes.shape != each.shape[:1]:
        raise ValueError(
            f"`y` must have shape (N,) = {shape_text(each.shape[:1])}, beside `probabilities`, but got "
            f"{brief(y)}."
        )
    confidence, right = each.max(1).clip(0, 1), each.argmax(1) == classes
    index = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    filled, where, counts = np.unique(index, return_inverse=True, return_counts=True)
    accuracy = np.bincount(where, right) / counts
    marks = np.bincount(where, confidence) / counts
    ax = make_axes(ax, 5.6, 4.0)
    _draw_bins(ax, filled / num_bins, 1 / num_bins, accuracy, marks, counts / len(classes))
    add_labels(ax, "confidence", "accuracy")
    add_legend(ax)
    return ax


def _draw_bins(
    ax: Axes, left: Array, width: float, accuracy: Array, confidence: Array, share: Array
) -> None:
    bars: dict[str, Any] = {"width": width, "align": "edge", "edgecolor": "white"}
    ax.bar(left, accuracy, color=BLUE, label="accuracy", **bars)
    tallest = f"share of examples,\ntallest {share.max():.0%}"
    ax.bar(left, -DEPTH * share / share.max(), color="0.75", label=tallest, **bars)
    ax.hlines(confidence, left, left + width, color=BLACK, linewidth=2, label="mean confidence")
    ax.axhline(0, color=BLACK, linewidth=0.8)
    _draw_diagonal(ax)
    ax.set_ylim(-1.15 * DEPTH, 1.02)


def _draw_diagonal(ax: Axes) -> None:
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="calibrated")
    ticks = np.linspace(0, 1, 6)
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-0.02, 1.02)


def _check_simplex(probabilities: Array) -> None:
    off = np.abs(probabilities.sum(1) - 1) > TOLERANCE
    wrong = off | (probabilities < -TOLERANCE).any(1)
    if wrong.any():
        raise ValueError(
            "`probabilities` must be at least 0 and sum to 1 over the classes, but row "
            f"{int(wrong.argmax())} is not. Pass `logits.softmax(-1)` for logits."
        )


@checked
def plot_risk_coverage(
    coverage: Values,
    risk: Values | Mapping[str, Values],
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """Draw the risk among the examples that are answered, over their share of all examples.

    Examples are answered from the surest to the least sure one, so a curve that rises late belongs
    to an uncertainty that knows which answers are wrong.

    Args:
        coverage: Shares of examples that are answered ``(N,)``, from 0 to 1.
        risk: Average loss of those examples ``(N,)``, such as their share of errors; or several
            curves at the same shares, by label.
        ax: Where to draw; a new figure when None.
        label: What the legend calls a single curve.

    Returns:
        The axes.

    Raises:
        ValueError: If sizes differ, a share is not between 0 and 1, or a risk is negative.

    Example:
        >>> ax = plot_risk_coverage([0.5, 1.0], {"mean field": [0.1, 0.2], "k-tied": [0.05, 0.2]})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['mean field', 'k-tied']

    References:
        Geifman and El-Yaniv (2017), "Selective classification for deep neural networks", Eq. 1 and
        2.
    """
    shares = real_array("coverage", coverage)
    check_shares("coverage", shares)
    curves = by_label("risk", risk, label)
    for name, values in curves.values():
        check_as_many("coverage", shares, name, values)
        check_not_negative(name, values, "an average loss")
    ax = make_axes(ax)
    for index, (title, (_, values)) in enumerate(curves.items()):
        ax.plot(shares, values, label=title, **curve_style(index))
    ax.set_xlim(0, 1.02)
    ax.set_ylim(bottom=0)
    add_labels(ax, "coverage (share of examples answered)", "risk of those answered")
    add_legend(ax)
    return ax


@checked
def plot_coverage(
    levels: Values,
    coverage: Values | Mapping[str, Values],
    ax: Axes | None = None,
    label: str | None = None,
    num_examples: Count | None = None,
) -> Axes:
    r"""Draw which share of targets lies in predictive intervals, over the share that should.

    A curve below the diagonal belongs to intervals that are too narrow. With N independent
    examples, the observed share of right intervals has the standard error :math:`\sqrt{l (1 - l) /
    N}` at level l; the grey band is two of them to either side.

    Args:
        levels: Probabilities of the intervals ``(L,)``, from 0 to 1.
        coverage: Shares of targets inside ``(L,)``, from 0 to 1; or several curves at the same
            levels, by label.
        ax: Where to draw; a new figure when None.
        label: What the legend calls a single curve.
        num_examples: The number N of examples, for the grey band; no band when None.

    Returns:
        The axes.

    Raises:
        ValueError: If sizes differ, or a share is not between 0 and 1.

    Example:
        >>> ax = plot_coverage([0.5, 0.9], [0.4, 0.8], num_examples=100)
        >>> ax.get_ylabel()
        'observed coverage'

    References:
        Kuleshov, Fenner and Ermon (2018), "Accurate uncertainties for deep learning using
        calibrated regression", section 3.
    """
    expected = real_array("levels", levels)
    check_shares("levels", expected)
    curves = by_label("coverage", coverage, label)
    for name, values in curves.values():
        check_as_many("levels", expected, name, values)
        check_shares(name, values)
    ax = make_axes(ax, 5.2, 3.8)
    if num_examples is not None:
        _draw_two_standard_errors(ax, num_examples)
    _draw_diagonal(ax)
    for index, (title, (_, values)) in enumerate(curves.items()):
        style = curve_style(index)
        ax.plot(expected, values, marker="o", markersize=4, label=title, **style)
    add_labels(ax, "expected coverage", "observed coverage")
    add_legend(ax)
    return ax


def _draw_two_standard_errors(ax: Axes, num_examples: int) -> None:
    line = np.linspace(0, 1, 101)
    error = 2 * np.sqrt(line * (1 - line) / num_examples)
    low, high = np.clip(line - error, 0, 1), np.clip(line + error, 0, 1)
    label = f"2 standard errors\nof {num_examples} examples"
    ax.fill_between(line, low, high, color="0.85", linewidth=0, label=label)


# Colours of classes, bright enough before the colours of the values.
CLASS_COLOURS = ("#D55E00", "#56B4E9", "#FFFFFF", "#CC79A7", "#009E73", "#E69F00", "#000000")
LEVELS = 12


@checked
def plot_decision(
    grid_x: Values,
    grid_y: Values,
    values: Matrix,
    x: Matrix | None = None,
    y: Values | None = None,
    ax: Axes | None = None,
    label: str = "probability",
) -> Axes:
    """Draw a probability, or an uncertainty, over a plane of inputs, and the data by class.

    Args:
        grid_x: First inputs of the grid ``(A,)``, ascending.
        grid_y: Second inputs of the grid ``(B,)``, ascending.
        values: What is predicted at the grid ``(B, A)``: a row for each second input, as
            ``torch.meshgrid(grid_x, grid_y, indexing="xy")`` has it.
        x: Inputs of the data ``(N, 2)``.
        y: Classes of the data ``(N,)``, whole numbers from 0 on; data have one colour when None.
        ax: Where to draw; a new figure when None.
        label: What the values are, with their unit, for the colour bar: ``"entropy (nats)"``.

    Returns:
        The axes.

    Raises:
        ValueError: If shapes do not fit, or the grid does not ascend.

    Example:
        >>> import torch
        >>> grid = torch.linspace(-1, 1, 20)
        >>> probability = (3 * grid).sigmoid().expand(20, 20)
        >>> ax = plot_decision(grid, grid, probability, torch.eye(2), torch.tensor([0, 1]))
        >>> ax.figure.axes[-1].get_ylabel()
        'probability'
    """
    columns, rows = _ascending("grid_x", grid_x), _ascending("grid_y", grid_y)
    heights = real_array("values", values, dim=2)
    if heights.shape != (len(rows), len(columns)):
        raise ValueError(
            f"`values` must have shape (B, A) = {shape_text((len(rows), len(columns)))}, a row for each "
            f"of `grid_y`, but got {shape_text(heights.shape)}."
        )
    groups = _by_class(x, y)
    ax = make_axes(ax, 6.2, 4.0)
    low, high = heights.min(), heights.max()
    levels = MaxNLocator(LEVELS).tick_values(low, high if high > low else low + 1.0)
    contours = ax.contourf(columns, rows, heights, levels=levels, cmap=SEQUENTIAL)
    for index, (name, points) in enumerate(groups.items()):
        colour, marker = CLASS_COLOURS[index % 7], MARKERS[index % 7]
        style: dict[str, Any] = {"color": colour, "marker": marker, "edgecolors": "black"}
        style |= {"s": 22, "linewidths": 0.6, "zorder": 3, "label": name}
        ax.scatter(points[:, 0], points[:, 1], **style)
    ax.set_xlim(columns[0], columns[-1])
    ax.set_ylim(rows[0], rows[-1])
    add_colour_bar(ax, contours, label)
    add_labels(ax, "first input", "second input")
    add_legend(ax)
    return ax


def _ascending(name: str, values: Values) -> Array:
    grid = real_array(name, values)
    if len(grid) < 2 or (np.diff(grid) <= 0).any():
        raise ValueError(f"`{name}` must hold at least two numbers that ascend, but does not.")
    return grid


def _by_class(x: Matrix | None, y: Values | None) -> dict[str, Array]:
    """Return the inputs of the data by the name of their class."""
    if x is None:
        if y is not None:
            raise ValueError("`y` needs the inputs `x` of the data, but `x` is None.")
        return {}
    points = real_array("x", x, dim=2)
    if points.shape[1] != 2:
        raise ValueError(f"`x` must have shape (N, 2), but got {shape_text(points.shape)}.")
    if y is None:
        return {"data": points}
    classes = class_array("y", y, 2**31)
    if classes.shape != points.shape[:1]:
        raise ValueError(
            f"`y` must have shape (N,) = {shape_text(points.shape[:1])}, beside `x`, but got {brief(y)}."
        )
    return {f"class {each}": points[classes == each] for each in np.unique(classes)}


@checked
def plot_histograms(
    values: Mapping[str, Values],
    ax: Axes | None = None,
    num_bins: Count = 30,
    label: str = "entropy (nats)",
) -> Axes:
    """Draw histograms of several groups of examples over the same bins, as densities.

    Each has the area 1, so that groups of other sizes can be compared.

    Args:
        values: Scores ``(N,)`` of the examples of each group, by its name: predictive entropies or
            mutual informations, in and out of the distribution of the training data.
        ax: Where to draw; a new figure when None.
        num_bins: The number of bins, from the smallest to the largest of all scores.
        label: What the scores are, with their unit, for the horizontal axis.

    Returns:
        The axes.

    Raises:
        ValueError: If there is no group, or one without scores.

    Example:
        >>> ax = plot_histograms({"in": [0.0, 0.1], "out": [0.9, 1.0, 1.0]}, num_bins=2)
        >>> [patch.get_data().values.tolist() for patch in ax.patches]
        [[2.0, 0.0], [0.0, 2.0]]
    """
    groups = {name: scores for name, (_, scores) in by_label("values", values, None).items()}
    edges = np.histogram_bin_edges(np.concatenate([*groups.values()]), num_bins)
    ax = make_axes(ax)
    for index, (name, scores) in enumerate(groups.items()):
        density, _ = np.histogram(scores, edges, density=True)
        style = curve_style(index)
        line = {"edgecolor": style["color"], "linestyle": style["linestyle"], "linewidth": 1.2}
        ax.stairs(density, edges, fill=True, facecolor=(style["color"], 0.3), label=name, **line)
    ax.set_ylim(bottom=0)
    add_labels(ax, label, "density")
    add_legend(ax)
    return ax
