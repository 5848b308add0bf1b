"""Figures of predictions, scores, fits and posteriors.

Each function takes tensors, arrays or lists of numbers, and draws into the matplotlib axes ``ax``;
without them it makes a figure that belongs to no window. It returns the axes.
``ax.figure.savefig("figure.png")`` writes the figure to a file, and ``ax.figure`` at the end of a
notebook's cell shows it. Labels of axes that are set already stay as they are; they can be changed
on the axes that come back.
"""

from pyro_structvi.plots.bands import plot_band, plot_regressions
from pyro_structvi.plots.calibration import plot_coverage, plot_reliability, plot_risk_coverage
from pyro_structvi.plots.costs import plot_distance_over_cost
from pyro_structvi.plots.decisions import plot_decision
from pyro_structvi.plots.histograms import plot_histograms
from pyro_structvi.plots.scales import plot_covariance, plot_scale_matrix, plot_spectrum
from pyro_structvi.plots.traces import plot_elbo, plot_trace

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
