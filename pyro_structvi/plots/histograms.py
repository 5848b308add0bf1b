"""Figures of how scores are distributed: of data as in training, and of other data."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from pyro_structvi._checks import Count, checked
from pyro_structvi.plots.arrays import Values, by_label
from pyro_structvi.plots.figures import add_labels, add_legend, curve_style, make_axes


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
