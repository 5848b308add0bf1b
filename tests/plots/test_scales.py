"""Spectra, standard deviations with approximations of low rank, and covariances."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_structvi.plots import plot_covariance, plot_scale_matrix, plot_spectrum


def near_rank_one(rows=30, columns=12):
    rng = np.random.default_rng(0)
    rank_one = np.outer(rng.uniform(0.5, 2, rows), rng.uniform(0.5, 2, columns))
    return rank_one * np.exp(0.1 * rng.normal(size=(rows, columns)))


def test_singular_values_of_several_layers():
    layers = {"first": [4.0, 2.0, 1.0], "second": [3.0, 0.5]}
    ax = plot_spectrum(layers)
    assert ax.get_yscale() == "log"
    for line, (label, values) in zip(ax.lines, layers.items(), strict=True):
        expected = np.column_stack([np.arange(1, len(values) + 1), values])
        np.testing.assert_array_equal(line.get_xydata(), expected)
        assert line.get_label() == label


def test_explained_variance_is_that_of_the_best_approximations():
    """Component k explains what the error of the best approximation falls by, from rank k - 1 to k."""
    matrix = near_rank_one()
    U, s, Vh = np.linalg.svd(matrix, full_matrices=False)
    errors = [((matrix - (U[:, :k] * s[:k]) @ Vh[:k]) ** 2).sum() for k in range(len(s) + 1)]
    ax = plot_spectrum(s, quantity="explained variance")
    shares = ax.lines[0].get_ydata()
    np.testing.assert_allclose(shares, -np.diff(errors) / (matrix**2).sum(), atol=1e-12)
    ax.figure.draw_without_rendering()
    assert {"1", "2", "5", "10"} <= {label.get_text() for label in ax.get_xticklabels()}


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.0, 0.0]])
def test_singular_values_descend_from_above_zero(values):
    with pytest.raises(ValueError, match="`singular_values` must descend from a first value above"):
        plot_spectrum(values)


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


@pytest.mark.parametrize("ranks", [(), (0,), (1, 13)])
def test_ranks_are_those_that_the_matrix_can_have(ranks):
    with pytest.raises(ValueError, match="`ranks` must hold at least one number, all from 1 to 12"):
        plot_scale_matrix(near_rank_one(), ranks)


def test_standard_deviations_are_positive():
    with pytest.raises(ValueError, match="`scale` must be positive everywhere, but is not"):
        plot_scale_matrix(np.zeros((3, 3)))


def test_covariances_with_white_at_zero():
    factor = np.random.default_rng(0).normal(size=(5, 5))
    covariance = factor @ factor.T
    image = plot_covariance(covariance).images[0]
    np.testing.assert_array_equal(image.get_array(), covariance)
    assert image.get_clim() == (-np.abs(covariance).max(), np.abs(covariance).max())
    np.testing.assert_allclose(image.cmap(image.norm(0.0))[:3], 1.0, atol=0.04)
    image = plot_covariance(torch.as_tensor(covariance), correlation=True).images[0]
    draws = factor @ np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0]
    uncentred = np.corrcoef(np.concatenate([draws, -draws], 1))
    np.testing.assert_allclose(image.get_array(), uncentred, atol=1e-12)
    assert image.get_clim() == (-1, 1)
    assert image.axes.figure.axes[-1].get_ylabel() == "correlation"


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((2, 3)), r"`covariance` must be square, but got the shape \(2, 3\)"),
        (np.array([[1.0, 0.5], [0.4, 1.0]]), "`covariance` must be symmetric, but is not"),
        (np.array([[1.0, 0.0], [0.0, 0.0]]), "`covariance` must have positive variances"),
    ],
)
def test_what_is_no_covariance(matrix, message):
    with pytest.raises(ValueError, match=message):
        plot_covariance(matrix)
