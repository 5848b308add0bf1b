"""Figures of fits and posteriors: the bound over steps, importance weights, standard deviations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from pyro_structvi._checks import checked
from pyro_structvi.infer.history import History
from pyro_structvi.plots.figures import (
    SEQUENTIAL,
    Array,
    Matrix,
    Values,
    add_labels,
    add_legend,
    draw_diagonal,
    figure_of,
    make_axes,
    make_panels,
    next_style,
    real_array,
    same_length,
)

WINDOWS = 50  # the running mean is over this fraction of the steps
HIDDEN = 0.1  # share of initial steps that may be out of view
OUTSIDE = 0.005  # share of standard deviations beyond either end of the colours


@checked
def plot_elbo(history: History, ax: Axes | None = None) -> Axes:
    """Draw the evidence lower bound and the KL divergence over the steps of a fit.

    Lines are running means over a fiftieth of the steps. The first tenth may be out of view.

    Args:
        history: The return value of :func:`~pyro_structvi.fit`.
        ax: Axes of the drawing; a new figure when None.

    Raises:
        ValueError: If the history is empty.

    Example:
        >>> from pyro_structvi.infer import History
        >>> ax = plot_elbo(History(elbo=[-9.0, -5.0], kl=[3.0, 2.0]))
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['ELBO', 'KL']
    """
    given = {"history.elbo": history.elbo, "history.kl": history.kl}
    elbo, kl = same_length(given).values()
    ax = make_axes(ax)
    seen = [*ax.get_ylim()] if ax.lines else []
    steps, window = np.arange(1, len(elbo) + 1), max(1, len(elbo) // WINDOWS)
    for label, values in {"ELBO": elbo, "KL": kl}.items():
        style = next_style(ax)
        if window > 1:
            ax.plot(steps, values, color=style["color"], linewidth=0.6, alpha=0.3)
        ax.plot(steps, running_mean(values, window), label=label, **style)
        shown = values[int(HIDDEN * len(values)) :]
        seen += [shown.min(), shown.max()]
    padding = 0.05 * (max(seen) - min(seen)) or 1.0
    ax.set_ylim(min(seen) - padding, max(seen) + padding)
    add_labels(ax, "step", "nats")
    add_legend(ax)
    return ax


def running_mean(values: Array, window: int) -> Array:
    """Return averages over a window around each step, truncated at the ends."""
    size, before = len(values), (window - 1) // 2
    # A window has the end of one block of its length and the start of the next one. Differences of sums
    # from the first step on would have the rounding of the largest values.
    blocks = np.zeros((-(-size // window) + 1, window))
    blocks.flat[before : before + size] = values
    ends = blocks[:, ::-1].cumsum(1)[:, ::-1]
    starts = np.pad(blocks[:, :-1].cumsum(1), [(0, 0), (1, 0)])
    first = np.arange(size) - before
    counts = (first + window).clip(max=size) - first.clip(0)
    return (ends[:-1] + starts[1:]).flatten()[:size] / counts


@checked
def plot_importance(log_weights: Values, ax: Axes | None = None, label: str = "guide") -> Axes:
    r"""Draw the share of the total importance weight in the largest weights.

    With the normalized weights :math:`w_s` in descending order, the curve at the share :math:`k / S` of
    draws is :math:`\sum_{s \le k} w_s`. It is the diagonal if the guide is the posterior, and rises
    steeply if a few draws have all the weight.

    Args:
        log_weights: Log weights :math:`r_s` ``(S,)`` in nats, such as
            ``diagnostics.pareto_k(...).log_weights``.
        ax: Axes of the drawing; a new figure when None.
        label: Name of the curve in the legend.

    Raises:
        ValueError: If there is no weight, or one is not finite.

    Example:
        >>> ax = plot_importance([0.0, 0.0, 0.0, 0.0])
        >>> ax.lines[-1].get_ydata().tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]

    References:
        Yao, Vehtari, Simpson and Gelman (2018), "Yes, but did it work? Evaluating variational
        inference".
    """
    values = np.sort(real_array("log_weights", log_weights))[::-1]
    weights = np.exp(values - values[0])
    held = np.concatenate([[0.0], (weights / weights.sum()).cumsum()])
    ax = make_axes(ax)
    draw_diagonal(ax, "posterior")
    ax.plot(np.linspace(0, 1, len(held)), held, label=label, **next_style(ax))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    add_labels(ax, "draws, largest weight first", "share of the total weight")
    add_legend(ax)
    return ax


@checked
def plot_scale_matrix(scale: Matrix, ranks: Sequence[int] = (1, 2)) -> list[Axes]:
    """Draw a layer's posterior standard deviations and their best approximations of low rank.

    Approximations are by the singular value decomposition, and their titles have the explained share of
    the sum of squares. All panels share the colours, from the 0.5% to the 99.5% quantile.

    Args:
        scale: Standard deviations ``(out, in)``, in the weights' units.
        ranks: Ranks of the approximations, each a panel.

    Raises:
        ValueError: If a standard deviation is not positive, or a rank is impossible for the matrix.

    Example:
        >>> import torch
        >>> axes = plot_scale_matrix(torch.rand(20, 10) + 0.5, ranks=(1, 2))
        >>> len(axes)
        3

    References:
        Swiatkowski et al. (2020), "The k-tied normal distribution: a compact parameterization of
        Gaussian mean field posteriors in Bayesian neural networks", Figures 2 and 9 of the
        submission to ICLR 2020.
    """
    matrix = real_array("scale", scale, dim=2)
    if (matrix <= 0).any():
        raise ValueError(
            "`scale` must be positive everywhere, but is not. Pass standard deviations, for instance "
            "`log_scale.exp()`."
        )
    most = min(matrix.shape)
    if not ranks or not all(1 <= rank <= most for rank in ranks):
        raise ValueError(f"`ranks` must hold at least one number, all from 1 to {most}.")
    count = 1 + len(ranks)
    height = float(np.clip(2.2 * matrix.shape[0] / matrix.shape[1], 2.4, 4.5))
    panels = make_panels(1, count, 2.0 * count + 1.2, height, sharex=True, sharey=True)
    U, s, Vh = np.linalg.svd(matrix, full_matrices=False)
    matrices, titles = [matrix], ["standard\ndeviations"]
    for rank in ranks:
        matrices.append((U[:, :rank] * s[:rank]) @ Vh[:rank])
        titles.append(f"rank {rank}\nexplains {(s[:rank] ** 2).sum() / (s**2).sum():.1%}")
    low, high = np.quantile(matrix, [OUTSIDE, 1 - OUTSIDE])
    for panel, each, title in zip(panels, matrices, titles, strict=True):
        image = panel.imshow(each, aspect="auto", cmap=SEQUENTIAL, vmin=low, vmax=high)
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel("input")
    panels[0].set_ylabel("output")
    bar: dict[str, Any] = {"label": "standard deviation\n(weights' units)", "extend": "both"}
    figure_of(panels[0]).colorbar(image, ax=panels, **bar)
    return panels
