"""Figures of predictions, fits and posteriors.

Each function takes tensors, arrays or lists of numbers, draws into the matplotlib axes ``ax``, and
returns them. Without axes it makes a figure that belongs to no window: ``ax.figure`` shows it at the
end of a notebook's cell, and ``ax.figure.savefig("figure.png")`` saves it. Existing labels of axes are
kept, and further curves in the same axes have other colours.
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
