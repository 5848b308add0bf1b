"""Figures of what happened in the steps of a fit."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from pyro_structvi._checks import Count, Share, checked
from pyro_structvi.infer.history import History
from pyro_structvi.plots.arrays import Array, Values, by_label, real_array
from pyro_structvi.plots.figures import add_labels, add_legend, curve_style, make_axes

# Without a window of the caller's, the running mean is over this part of the steps.
WINDOWS = 50


@checked
def plot_trace(
    values: Mapping[str, Values],
    ax: Axes | None = None,
    smooth: Count | None = None,
    start: Share = 0.1,
    label: str = "value",
) -> Axes:
    """Draw series of numbers over steps, pale, and their running means.

    The running mean at a step is the average over the ``smooth`` steps about it, or over those of
    them that there are.

    Args:
        values: One number a step, by the name of the series.
        ax: Where to draw; a new figure when None.
        smooth: Steps in a running mean; a fiftieth of the steps when None, and 1 draws the numbers
            alone.
        start: Share of the steps, the first ones, that need not be in view: they would often
            flatten all the rest. They are drawn, and ``ax.autoscale()`` brings them into view.
        label: What the numbers are, with their unit, for the vertical axis.

    Returns:
        The axes.

    Raises:
        ValueError: If there is no series, or one without numbers.

    Example:
        >>> ax = plot_trace({"loss": [3.0, 2.0, 1.0, 0.0]}, smooth=3, start=0.0)
        >>> ax.lines[1].get_ydata().tolist()
        [2.5, 2.0, 1.0, 0.5]
    """
    series = {str(key): own for key, (_, own) in by_label("values", values, None).items()}
    return _draw_series(series, ax, smooth, start, label)


@checked
def plot_elbo(
    history: History,
    ax: Axes | None = None,
    kl_by_site: Mapping[str, Values] | None = None,
    smooth: Count | None = None,
    start: Share = 0.1,
) -> Axes:
    """Draw the evidence lower bound and the KL divergence over the steps of a fit.

    Args:
        history: What :func:`~pyro_structvi.fit` returns. Only ``elbo`` and ``kl`` are read.
        ax: Where to draw; a new figure when None.
        kl_by_site: The KL of each site in each step, in nats. :func:`plot_trace` draws them alone.
        smooth: Steps in a running mean; a fiftieth of the steps when None.
        start: Share of the steps, the first ones, that need not be in view.

    Returns:
        The axes.

    Raises:
        ValueError: If the history has no step, or a site has not one number a step.

    Example:
        >>> from pyro_structvi.infer import History
        >>> ax = plot_elbo(History(elbo=[-9.0, -5.0], kl=[3.0, 2.0]), kl_by_site={"weight": [3.0, 2.0]})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['ELBO', 'KL', 'KL of weight']
    """
    elbo, kl = real_array("history.elbo", history.elbo), real_array("history.kl", history.kl)
    sites = by_label("kl_by_site", kl_by_site, None) if kl_by_site else {}
    for name, own in [("history.kl", kl), *sites.values()]:
        if len(own) != len(elbo):
            raise ValueError(
                f"`{name}` must have one number a step, as many as `history.elbo`, {len(elbo)}, but has "
                f"{len(own)}. `plot_trace` draws series of any length."
            )
    of_sites = {f"KL of {site}": own for site, (_, own) in sites.items()}
    return _draw_series({"ELBO": elbo, "KL": kl} | of_sites, ax, smooth, start, "nats")


def _draw_series(
    series: Mapping[str, Array], ax: Axes | None, smooth: int | None, start: float, label: str
) -> Axes:
    ax = make_axes(ax)
    seen = [*ax.get_ylim()] if ax.lines else []
    for index, (name, values) in enumerate(series.items()):
        window = smooth or max(1, len(values) // WINDOWS)
        steps, style = np.arange(1, len(values) + 1), curve_style(index)
        if window > 1:
            ax.plot(steps, values, color=style["color"], linewidth=0.6, alpha=0.3)
        ax.plot(steps, running_mean(values, window), label=name, **style)
        shown = values[int(start * len(values)) :]
        seen += [shown.min(), shown.max()]
    padding = 0.05 * (max(seen) - min(seen)) or 1.0
    ax.set_ylim(min(seen) - padding, max(seen) + padding)
    add_labels(ax, "step", label)
    add_legend(ax)
    return ax


def running_mean(values: Array, window: int) -> Array:
    """Return averages over the window about each step, cut off at the ends."""
    size = len(values)
    sums = np.concatenate([[0.0], values.cumsum()])
    first = np.arange(size) - (window - 1) // 2
    low, high = first.clip(0), (first + window).clip(max=size)
    means: Array = (sums[high] - sums[low]) / (high - low)
    return means
