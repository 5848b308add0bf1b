"""Figures of classifications with two inputs: where a posterior is sure of which class."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_structvi._checks import brief, checked, shape_text
from pyro_structvi.plots.arrays import Array, Matrix, Values, class_array, real_array
from pyro_structvi.plots.figures import (
    MARKERS,
    SEQUENTIAL,
    add_colour_bar,
    add_labels,
    add_legend,
    make_axes,
)

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
