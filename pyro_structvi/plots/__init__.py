"""Figures of predictions, fits and posteriors.

Each function takes tensors, arrays or lists of numbers, and draws into the matplotlib axes ``ax``;
without them it makes a figure that belongs to no window. It returns the axes.
``ax.figure.savefig("figure.png")`` writes the figure to a file, and ``ax.figure`` at the end of a
notebook's cell shows it. Labels of axes that are set already stay as they are; they can be changed
on the axes that come back.
"""

from pyro_structvi.plots.fits import plot_elbo, plot_importance, plot_scale_matrix
from pyro_structvi.plots.predictions import plot_band, plot_coverage, plot_reliability

__all__ = [
    # predictions
    "plot_band",
    "plot_coverage",
    "plot_reliability",
    # fits and posteriors
    "plot_elbo",
    "plot_importance",
    "plot_scale_matrix",
]
