"""Bands about functions, reliability diagrams, coverage of intervals."""

import numpy as np
import pytest
import torch

from pyro_structvi.plots import plot_band, plot_coverage, plot_reliability
from pyro_structvi.plots.predictions import DEPTH

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
    lower, upper = MEAN - 1.0, MEAN + 2.0
    truth, points = MEAN + 0.1, ([0.5, 2.0], [7.0, 8.0])
    ax = plot_band(
        X, MEAN, lower=lower, upper=upper, data_x=points[0], data_y=points[1], truth=truth
    )
    band, data = ax.collections
    np.testing.assert_allclose(ends(band), (lower, upper))
    np.testing.assert_array_equal(data.get_offsets(), np.transpose(points))
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), truth)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["mean", "truth", "data"]


def drawn_bins(ax):
    """Return by bin, of those that are drawn: left end, accuracy, share below the axis, confidence."""
    accuracy, share = ax.containers
    marks = ax.collections[0].get_segments()
    return [
        (bar.get_x(), bar.get_height(), -below.get_height(), mark[0][1])
        for bar, below, mark in zip(accuracy, share, marks, strict=True)
    ]


def bins_by_definition(probabilities, y, num_bins):
    """Return the same by counting, bin by bin."""
    found = []
    confidence, classes = probabilities.max(-1)
    for index in range(num_bins):
        inside = (confidence > index / num_bins) & (confidence <= (index + 1) / num_bins)
        if inside.any():
            right = (classes[inside] == y[inside]).double().mean()
            share = inside.double().mean()
            found.append((index / num_bins, right, share, confidence[inside].mean()))
    return np.array(found)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_bars_are_accuracies_and_shares_by_bin(num_bins):
    probabilities, y = (2 * torch.randn(300, 4)).softmax(-1), torch.randint(4, (300,))
    bins = np.array(drawn_bins(plot_reliability(probabilities, y, num_bins)))
    expected = bins_by_definition(probabilities, y, num_bins)
    expected[:, 2] *= DEPTH / expected[:, 2].max()
    np.testing.assert_allclose(bins, expected, atol=1e-12)


def test_ends_of_bins_belong_to_the_bin_below():
    probabilities = np.array([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0], [1.0, 0.0]])
    bins = drawn_bins(plot_reliability(probabilities, [0, 0, 1, 0], num_bins=4))
    assert bins == [(0.25, 1.0, DEPTH / 2, 0.5), (0.5, 1.0, DEPTH / 2, 0.75), (0.75, 0.5, DEPTH, 1)]


def test_probabilities_in_half_precision_need_no_exact_sums():
    probabilities = torch.randn(200, 30).softmax(-1).to(torch.bfloat16)
    assert (probabilities.double().sum(-1) - 1).abs().max() > 1e-3
    assert drawn_bins(plot_reliability(probabilities, torch.zeros(200, dtype=torch.long)))


def test_the_diagonal_and_the_tallest_share_are_told():
    ax = plot_reliability(np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]), [0, 1, 1], num_bins=2)
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[0, 0], [1, 1]])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "share of examples,\ntallest 100%" in texts


def test_coverage_over_its_level_with_two_standard_errors():
    levels, coverage = [0.5, 0.9], [0.4, 0.95]
    ax = plot_coverage(levels, coverage, num_examples=100)
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), np.column_stack([levels, coverage]))
    backwards = plot_coverage(levels[::-1], coverage[::-1])
    np.testing.assert_array_equal(backwards.lines[1].get_xydata(), ax.lines[1].get_xydata())
    vertices = ax.collections[0].get_paths()[0].vertices
    # At one half the standard error of 100 examples is 0.05, and at 0.9 it is 0.03.
    for level, error in ((0.5, 0.05), (0.9, 0.03)):
        heights = vertices[np.isclose(vertices[:, 0], level), 1]
        np.testing.assert_allclose([heights.min(), heights.max()], level + 2 * error * np.r_[-1, 1])
    assert 0 <= vertices[:, 1].min() <= vertices[:, 1].max() <= 1
    assert not plot_coverage(levels, coverage).collections


WRONG = (
    ({}, "Either `scale` or both `lower` and `upper` must be given"),
    ({"scale": SCALE, "lower": X, "upper": X}, "Either `scale` or both `lower`"),
    ({"lower": MEAN}, "Either `scale` or both `lower` and `upper`"),
    ({"scale": -SCALE}, "`scale` must be a standard deviation, so at least 0"),
    ({"scale": SCALE[:2]}, "`x` and `scale` must have as many values, but got 3 and 2"),
    ({"scale": SCALE, "widths": ()}, "`widths` must hold at least one number, all positive"),
    ({"scale": SCALE, "widths": (0.0,)}, "`widths` must hold at least one number"),
    ({"lower": MEAN, "upper": MEAN - 1}, "`lower` must be at most `upper`"),
    ({"scale": SCALE, "data_x": X}, "`data_x` and `data_y` must be given together"),
    ({"scale": SCALE, "data_x": X, "data_y": X[:1]}, "`data_x` and `data_y` must have as many"),
    ({"scale": SCALE, "truth": X[:1]}, "`x` and `truth` must have as many values"),
    ({"scale": SCALE, "x": X[::-1]}, "`x` must be ascending, .*Sort all arguments"),
)
WRONG_CLASSES = (
    ([[0.9, 0.2]], [0], "`probabilities` must be at least 0 and sum to 1 .* row 0 is not"),
    ([[0.5, 0.5], [1.5, -0.5]], [0, 0], "row 1 is not. Pass `logits.softmax"),
    ([[0.3], [0.9]], [0, 1], r"Pass `torch.cat\(\[1 - p, p\], -1\)` for probabilities p of binary"),
    ([[0.5, 0.5]], [2], "`y` must hold whole numbers of at least 0 and below 2"),
    ([[0.5, 0.5]], [0, 1], r"`y` must have shape \(N,\) = \(1,\).*, beside `probabilities`"),
)
WRONG_COVERAGE = (
    ([50.0], [0.4], "`levels` must hold shares from 0 to 1"),
    ([0.5], {"a": [1.1]}, r"`coverage\['a'\]` must hold shares from 0 to 1"),
    ([0.5], [0.4, 0.5], "`levels` and `coverage` must have as many values"),
    (torch.tensor([True]), [0.5], "`levels` must hold real numbers, but got a torch.Tensor"),
    (np.array(["a"]), [0.5], "`levels` must hold real numbers, but got a ndarray"),
    ([], [0.5], r"`levels` must hold at least one number, in 1 .*shape \(0,\)"),
    (np.ones((2, 2)), [0.5], r"in 1 dimension, but got the shape \(2, 2\)"),
    ([1.0, np.nan], [0.5], "`levels` must be finite everywhere"),
    ([0.5], {}, "`coverage` must hold at least one entry, but is empty"),
)


def test_other_arguments_are_refused():
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            plot_band(**{"x": X, "mean": MEAN} | options)
    with pytest.raises(TypeError, match="`lower` must be a"):
        plot_band(X, MEAN, lower=[MEAN], upper=[MEAN])
    for probabilities, y, message in WRONG_CLASSES:
        with pytest.raises(ValueError, match=message):
            plot_reliability(torch.tensor(probabilities), y)
    for levels, coverage, message in WRONG_COVERAGE:
        with pytest.raises(ValueError, match=message):
            plot_coverage(levels, coverage)
    with pytest.raises(ValueError, match="`label` must be None where `coverage` is a mapping"):
        plot_coverage([0.5], {"guide": [0.4]}, label="guide")
