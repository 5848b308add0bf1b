"""Shares of the total weight."""

import numpy as np
import torch

from pyro_structvi.plots import plot_importance


def test_the_curve_by_its_definition():
    log_weights = torch.randn(50) - 2000.0  # exponentials of these are zero
    weights = sorted((log_weights + 2000.0).exp().tolist(), reverse=True)
    ax = plot_importance(log_weights, label="k-tied")
    held = [sum(weights[:count]) / sum(weights) for count in range(51)]
    expected = np.column_stack([np.arange(51) / 50, held])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), expected, atol=1e-12)
    assert [line.get_label() for line in ax.lines] == ["posterior", "k-tied"]
