"""Figures of posteriors' distances to the exact posterior over their costs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.label_places import place_labels
from pyro_structvi.plots.figures import BLUE, GREY, Array, add_labels, make_axes

# An axis is logarithmic if its largest number is more than so many times its smallest.
WIDE = 8.0


def plot_distance_over_cost(
    rows: Mapping[str, tuple[float, float]],
    ax: Axes | None = None,
    errors: Mapping[str, float] | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
    unit: str = "s",
    label: str = "distance to the exact posterior",
) -> Axes:
    """Draw posteriors as points: their distance to a reference over the cost of training.

    An axis is logarithmic if its numbers are positive and the largest is more than 8 times the
    smallest. Names are placed for the limits and the size that the axes have at the call.

    Args:
        rows: Cost and distance of each posterior, by its name.
        ax: Where to draw; a new figure when None.
        errors: Standard errors of distances, by name, in the distance's units; of some posteriors
            or of all.
        floor: The smallest distance that can be told from none, such as that between two sets of
            draws of the reference.
        ceiling: The distance of a posterior that has learnt nothing, such as that of the prior.
        unit: The unit of the costs.
        label: What the distance is, with its unit, for the vertical axis.

    Returns:
        The axes.

    Example:
        >>> ax = plot_distance_over_cost({"mean field": (1.0, 0.5), "full": (60.0, 0.2)}, floor=0.1)
        >>> ax.get_xscale(), ax.get_yscale()
        ('log', 'linear')
    """
    cost, distance = np.asarray([*rows.values()], dtype=np.float64).T
    error = np.asarray([(errors or {}).get(name, 0.0) for name in rows], dtype=np.float64)
    ax = make_axes(ax, 7.0, 4.6)
    lines = {
        name: height
        for name, height in (("floor", floor), ("ceiling", ceiling))
        if height is not None
    }
    heights = np.concatenate([distance, [*lines.values()]])
    ax.set_xscale(_scale(cost))
    ax.set_yscale(_scale(heights))
    ax.margins(0.12, 0.1)
    ax.errorbar(cost, distance, error, fmt="o", color=BLUE, ecolor=GREY, elinewidth=1, markersize=5)
    for name, height in lines.items():
        ax.axhline(height, color=GREY, linewidth=1, linestyle="--")
        beside: dict[str, Any] = {
            "xycoords": ax.get_yaxis_transform(),
            "textcoords": "offset points",
        }
        ax.annotate(name, (1, height), xytext=(4, 0), va="center", color=GREY, **beside)
    add_labels(ax, f"cost of training ({unit})", label)
    place_labels(ax, [*rows], cost, distance, error)
    return ax


def _scale(values: Array) -> str:
    is_wide = values.min() > 0 and values.max() > WIDE * values.min()
    return "log" if is_wide else "linear"
