"""Bands about functions of one input."""

import numpy as np
import pytest

from pyro_structvi.plots import plot_band

X = np.array([0.0, 1.0, 3.0])
MEAN = np.array([1.0, -1.0, 0.5])
SCALE = np.array([0.1, 0.0, 0.4])


def ends(band):
    """Return the lower and the upper ends of a band, by its vertices at each input."""
    vertices = band.get_paths()[0].vertices
    heights = [vertices[vertices[:, 0] == x, 1] for x in X]
    return np.array([each.min() for each in heights]), np.array([each.max() for each in heights])


def test_bands_are_the_mean_and_multiples_of_the_scale():
    ax = plot_band(X, MEAN, SCALE, widths=(0.5, 2.0))
    assert len(ax.collections) == 2
    for band, width in zip(ax.collections, (0.5, 2.0), strict=True):
        np.testing.assert_allclose(ends(band), (MEAN - width * SCALE, MEAN + width * SCALE))
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), np.column_stack([X, MEAN]))


def test_bands_by_their_ends_with_data_and_truth():
    lower, upper = MEAN - np.array([[1.0], [0.5]]), MEAN + np.array([[2.0], [0.25]])
    truth, points = MEAN + 0.1, ([0.5, 2.0], [7.0, 8.0])
    ax = plot_band(
        X, MEAN, lower=lower, upper=upper, data_x=points[0], data_y=points[1], truth=truth
    )
    *bands, data = ax.collections
    for band, low, high in zip(bands, lower, upper, strict=True):
        np.testing.assert_allclose(ends(band), (low, high))
    np.testing.assert_array_equal(data.get_offsets(), np.transpose(points))
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), truth)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["mean", "truth", "data"]
    assert len(plot_band(X, MEAN, lower=lower[0], upper=upper[0]).collections) == 1


WRONG = (
    ({}, "Either `scale` or both `lower` and `upper` must be given"),
    ({"scale": SCALE, "lower": X, "upper": X}, "Either `scale` or both `lower`"),
    ({"lower": MEAN}, "Either `scale` or both `lower` and `upper`"),
    ({"scale": SCALE[:2]}, "`mean` and `scale` must have as many values, but got 3 and 2"),
    ({"lower": MEAN, "upper": MEAN - 1}, "`lower` must be at most `upper`"),
    ({"lower": np.stack([MEAN, MEAN]), "upper": MEAN}, "as many bands, but got 2 and 1"),
    ({"scale": SCALE, "data_x": X}, "`data_x` and `data_y` must be given together"),
    ({"scale": SCALE, "data_x": X, "data_y": X[:1]}, "`data_x` and `data_y` must have as many"),
)


def test_wrong_bands():
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            plot_band(X, MEAN, **options)
