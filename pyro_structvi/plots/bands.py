"""Figures of functions of one input: a mean, bands about it, data and truth."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from pyro_structvi._checks import check_real, checked
from pyro_structvi.plots.figures import (
    BLACK,
    BLUE,
    VERMILION,
    Array,
    Values,
    add_labels,
    add_legend,
    check_as_many,
    check_not_negative,
    figure_of,
    make_axes,
    make_panels,
    real_array,
)
from pyro_structvi.posterior.prediction import Prediction


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
    label: str = "mean",
) -> Axes:
    r"""Draw a function of one input with bands about it, data and truth.

    The bands are :math:`m(x) \pm k \, s(x)`, for each width k, or those between ``lower`` and
    ``upper``, which may be quantiles.

    Args:
        x: Inputs ``(N,)``, ascending.
        mean: The function m at the inputs ``(N,)``, in the targets' units.
        scale: Standard deviations s at the inputs ``(N,)``, in the targets' units; None where
            ``lower`` and ``upper`` say where bands are.
        ax: Where to draw; a new figure when None.
        widths: How many standard deviations each band reaches to either side.
        lower: Lower ends of a band ``(N,)``, or of K bands ``(K, N)``.
        upper: Upper ends of the same shape.
        data_x: Inputs of the data ``(D,)``.
        data_y: Targets of the data ``(D,)``.
        truth: The function that made the data, at ``x``.
        label: What the legend calls the function.

    Returns:
        The axes.

    Raises:
        ValueError: If sizes differ, a standard deviation is negative, or bands are given twice or
            not at all.

    Example:
        >>> ax = plot_band([0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0.1, 0.2, 0.3], widths=(1, 2))
        >>> len(ax.collections)
        2
    """
    inputs, means = real_array("x", x), real_array("mean", mean)
    check_as_many("x", inputs, "mean", means)
    bands = _bands(means, scale, widths, lower, upper)
    true = None if truth is None else real_array("truth", truth)
    if true is not None:
        check_as_many("x", inputs, "truth", true)
    points = _points(data_x, data_y)
    ax = make_axes(ax)
    draw_band(ax, inputs, means, bands, label, true, points)
    add_labels(ax, "input", "target")
    add_legend(ax)
    return ax


def _bands(
    mean: Array,
    scale: Values | None,
    widths: Sequence[float],
    lower: Values | None,
    upper: Values | None,
) -> list[tuple[Array, Array]]:
    """Return the lower and upper ends of each band."""
    if (lower is None) != (upper is None) or (lower is None) == (scale is None):
        raise ValueError(
            "Either `scale` or both `lower` and `upper` must be given: standard deviations, or the "
            "ends of bands."
        )
    if scale is not None:
        scales = real_array("scale", scale)
        check_as_many("mean", mean, "scale", scales)
        check_not_negative("scale", scales, "a standard deviation")
        if not widths or not all(0 < width < np.inf for width in widths):
            raise ValueError("`widths` must hold at least one number, all positive and finite.")
        return [(mean - width * scales, mean + width * scales) for width in widths]
    low, high = _ends("lower", lower, mean), _ends("upper", upper, mean)
    if low.shape != high.shape:
        raise ValueError(
            f"`lower` and `upper` must be as many bands, but got {len(low)} and {len(high)}."
        )
    if (low > high).any():
        raise ValueError("`lower` must be at most `upper` everywhere, but is not.")
    return list(zip(low, high, strict=True))


def _ends(name: str, values: Any, mean: Array) -> Array:
    dim = 2 if getattr(values, "ndim", 1) == 2 else 1
    ends = real_array(name, values, dim)
    check_as_many(name, ends, "mean", mean)
    return np.atleast_2d(ends)


def _points(x: Values | None, y: Values | None) -> tuple[Array, Array] | None:
    if (x is None) != (y is None):
        raise ValueError("`data_x` and `data_y` must be given together, or neither of them.")
    if x is None or y is None:
        return None
    points = real_array("data_x", x), real_array("data_y", y)
    check_as_many("data_x", points[0], "data_y", points[1])
    return points


def draw_band(
    ax: Axes,
    x: Array,
    mean: Array,
    bands: Sequence[tuple[Array, Array]],
    label: str,
    truth: Array | None,
    points: tuple[Array, Array] | None,
) -> None:
    """Draw bands, the mean, the truth and the data, in this order."""
    for low, high in bands:
        ax.fill_between(x, low, high, color=BLUE, alpha=0.2, linewidth=0)
    ax.plot(x, mean, color=BLUE, label=label)
    if truth is not None:
        ax.plot(x, truth, color=BLACK, linewidth=0.8, label="truth")
    if points is not None:
        ax.scatter(*points, s=6, color=VERMILION, zorder=3, label="data")


@checked
def plot_regressions(
    predictions: Mapping[str, Prediction],
    grid: Tensor,
    x: Tensor,
    y: Tensor,
    truth: Tensor | None = None,
    limits: tuple[float, float] | None = None,
) -> Any:
    """Draw one panel a method: mean, up to three standard deviations, data and truth.

    Args:
        predictions: What each method predicts on the grid, by the panel's title.
        grid: Inputs ``(N,)`` or ``(N, 1)``, ascending.
        x: Inputs of the data.
        y: Targets of the data.
        truth: The function that made the data, on the grid.
        limits: Range of the vertical axis, in the targets' units; from the data when None.

    Returns:
        A matplotlib figure, attached to no window.

    Raises:
        ValueError: If there is no prediction.

    Example:
        >>> import torch
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1)), num_data=8, noise_scale=0.1)
        >>> grid = torch.linspace(-1, 1, 20).unsqueeze(-1)
        >>> prediction = predict(model, MeanFieldGuide(model), grid)
        >>> figure = plot_regressions({"mean field": prediction}, grid, grid[::4], grid[::4])
        >>> len(figure.axes)
        1
    """
    if not predictions:
        raise ValueError("`predictions` must hold at least one prediction, but is empty.")
    _check_sizes(predictions, grid, x, y, truth)
    columns = min(len(predictions), 4)
    rows = -(-len(predictions) // columns)
    panels = make_panels(rows, columns, 3.2 * columns, 2.6 * rows, sharex=True, sharey=True)
    points = _flat(x), _flat(y)
    for panel, (title, prediction) in zip(panels, predictions.items(), strict=False):
        mean, scale = _flat(prediction.mean), _flat(prediction.variance.sqrt())
        bands = [(mean - width * scale, mean + width * scale) for width in (1, 2, 3)]
        label = "mean, up to 3 standard deviations"
        true = None if truth is None else _flat(truth)
        draw_band(panel, _flat(grid), mean, bands, label, true, points)
        panel.set_title(title)
        panel.set_ylim(limits or _padded(points[1]))
    for panel in panels[len(predictions) :]:
        panel.remove()
    for panel in panels[max(0, len(predictions) - columns) : len(predictions)]:
        panel.xaxis.set_tick_params(labelbottom=True)  # the lowest panel of each column
    figure = figure_of(panels[0])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _check_sizes(
    predictions: Mapping[str, Prediction], grid: Tensor, x: Tensor, y: Tensor, truth: Tensor | None
) -> None:
    pairs = [("x", x, "y", y)] + ([] if truth is None else [("grid", grid, "truth", truth)])
    pairs += [
        ("grid", grid, f"predictions['{title}'].mean", own.mean)
        for title, own in predictions.items()
    ]
    for name, values, other, others in pairs:
        check_real(name, values)
        check_real(other, others)
        if values.numel() != others.numel():
            raise ValueError(
                f"`{name}` and `{other}` must have as many values, but got {values.numel()} and "
                f"{others.numel()}."
            )


def _flat(values: Tensor) -> Array:
    """Return values as they are: where a prediction is not finite, its panel has a gap."""
    flat: Array = values.detach().flatten().cpu().double().numpy()
    return flat


def _padded(y: Array) -> tuple[float, float]:
    low, high = float(y.min()), float(y.max())
    padding = (high - low) or 1.0
    return low - padding, high + padding
