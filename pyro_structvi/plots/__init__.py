"""Figures of predictions, scores, fits and posteriors.

Each function takes tensors, arrays or lists of numbers, and draws into the matplotlib axes ``ax``;
without them it makes a figure that belongs to no window. It returns the axes.
``ax.figure.savefig("figure.png")`` writes the figure to a file, and ``ax.figure`` at the end of a
notebook's cell shows it. Labels of axes that are set already stay as they are; they can be changed
on the axes that come back.
"""

from pyro_structvi.plots.bands import plot_band, plot_regressions
from pyro_structvi.plots.costs import plot_distance_over_cost
from pyro_structvi.plots.fits import (
    plot_covariance,
    plot_elbo,
    plot_scale_matrix,
    plot_spectrum,
    plot_trace,
)
from pyro_structvi.plots.predictions import (
    plot_coverage,
    plot_decision,
    plot_histograms,
    plot_reliability,
    plot_risk_coverage,
)

__all__ = [
    # predictions
    "plot_band",
    "plot_decision",
    "plot_regressions",
    # scores
    "plot_coverage",
    "plot_distance_over_cost",
    "plot_histograms",
    "plot_reliability",
    "plot_risk_coverage",
    # fits
    "plot_elbo",
    "plot_trace",
    # posteriors of weights
    "plot_covariance",
    "plot_scale_matrix",
    "plot_spectrum",
]
