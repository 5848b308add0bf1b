"""Standard deviations with approximations of low rank."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_structvi.plots import plot_scale_matrix


def near_rank_one(rows=30, columns=12):
    rng = np.random.default_rng(0)
    rank_one = np.outer(rng.uniform(0.5, 2, rows), rng.uniform(0.5, 2, columns))
    return rank_one * np.exp(0.1 * rng.normal(size=(rows, columns)))


def test_panels_are_the_matrix_and_its_best_approximations():
    matrix = near_rank_one()
    panels = plot_scale_matrix(torch.as_tensor(matrix), ranks=(1, 3))
    images = [panel.images[0] for panel in panels]
    np.testing.assert_array_equal(images[0].get_array(), matrix)
    # The best approximation projects the rows on the leading eigenvectors of the Gram matrix.
    vectors = np.linalg.eigh(matrix.T @ matrix)[1][:, ::-1]
    for image, rank in zip(images[1:], (1, 3), strict=True):
        expected = matrix @ vectors[:, :rank] @ vectors[:, :rank].T
        np.testing.assert_allclose(image.get_array(), expected, atol=1e-12)
        share = (expected**2).sum() / (matrix**2).sum()
        title = image.axes.get_title()
        assert title == f"rank {rank}\nexplains {share:.1%}"
    assert {image.get_clim() for image in images} == {images[0].get_clim()}
    np.testing.assert_allclose(images[0].get_clim(), np.quantile(matrix, [0.005, 0.995]))
    assert panels[0].figure.axes[-1].get_ylabel().startswith("standard deviation")


def test_panels_of_the_users():
    axes = list(Figure().subplots(2, 2).flat)
    assert plot_scale_matrix(near_rank_one(), (1, 2, 3), axes) == axes
    with pytest.raises(ValueError, match="`axes` must hold 3 axes, but got 4"):
        plot_scale_matrix(near_rank_one(), (1, 2), axes)
    with pytest.raises(ValueError, match="`axes` must be of one figure"):
        plot_scale_matrix(near_rank_one(), (1,), [axes[0], Figure().subplots()])
    message = "`ranks` must hold at least one number, all from 1 to 12"
    with pytest.raises(ValueError, match=message):
        plot_scale_matrix(near_rank_one(), (1, 13))
