"""Figures of what posteriors cost, and how near to the exact posterior they come for it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_structvi._checks import NonNegative, checked
from pyro_structvi.plots.arrays import Array
from pyro_structvi.plots.figures import BLUE, GREY, add_labels, make_axes
from pyro_structvi.plots.label_places import place_labels

# An axis is logarithmic if its largest number is more than so many times its smallest.
WIDE = 8.0


@checked
def plot_distance_over_cost(
    rows: Mapping[str, tuple[float, float]],
    ax: Axes | None = None,
    errors: Mapping[str, NonNegative] | None = None,
    floor: NonNegative | None = None,
    ceiling: NonNegative | None = None,
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

    Raises:
        ValueError: If there is no row, a cost is not positive, a distance is negative, or an error
            has no row.

    Example:
        >>> ax = plot_distance_over_cost({"mean field": (1.0, 0.5), "full": (60.0, 0.2)}, floor=0.1)
        >>> ax.get_xscale(), ax.get_yscale()
        ('log', 'linear')
    """
    cost, distance = _columns(rows)
    error = _errors(rows, errors)
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


def _columns(rows: Mapping[str, tuple[float, float]]) -> tuple[Array, Array]:
    if not rows:
        raise ValueError("`rows` must hold at least one posterior, but is empty.")
    for name, (cost, distance) in rows.items():
        if not (0 < cost < np.inf and 0 <= distance < np.inf):
            raise ValueError(
                f"`rows[{name!r}]` must be a positive cost and a distance of at least 0, both finite."
            )
    table = np.asarray([*rows.values()], dtype=np.float64)
    return table[:, 0], table[:, 1]


def _errors(rows: Mapping[str, tuple[float, float]], errors: Mapping[str, float] | None) -> Array:
    errors = errors or {}
    unknown = [name for name in errors if name not in rows]
    if unknown:
        raise ValueError(
            f"`errors` must have the names of `rows`, but {unknown[0]!r} is none of them."
        )
    return np.asarray([errors.get(name, 0.0) for name in rows], dtype=np.float64)


def _scale(values: Array) -> str:
    is_wide = values.min() > 0 and values.max() > WIDE * values.min()
    return "log" if is_wide else "linear"
