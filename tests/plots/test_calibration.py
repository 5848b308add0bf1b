"""Reliability diagrams and coverage of intervals."""

import numpy as np
import pytest
import torch

from pyro_structvi.metrics import classification_scores
from pyro_structvi.plots import plot_coverage, plot_reliability
from pyro_structvi.plots.predictions import DEPTH


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


def test_the_gaps_are_the_calibration_error():
    probabilities, y = (2 * torch.randn(300, 4)).softmax(-1), torch.randint(4, (300,))
    _, accuracy, depth, confidence = np.array(drawn_bins(plot_reliability(probabilities, y))).T
    error = (depth / depth.sum() * np.abs(accuracy - confidence)).sum()
    expected = classification_scores(probabilities, y).calibration_error
    np.testing.assert_allclose(error, expected, rtol=1e-5)


def test_ends_of_bins_belong_to_the_bin_below():
    probabilities = np.array([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0], [1.0, 0.0]])
    bins = drawn_bins(plot_reliability(probabilities, [0, 0, 1, 0], num_bins=4))
    assert bins == [(0.25, 1.0, DEPTH / 2, 0.5), (0.5, 1.0, DEPTH / 2, 0.75), (0.75, 0.5, DEPTH, 1)]


def test_the_diagonal_and_the_tallest_share_are_told():
    ax = plot_reliability(np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]), [0, 1, 1], num_bins=2)
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[0, 0], [1, 1]])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "share of examples,\ntallest 100%" in texts


@pytest.mark.parametrize(
    ("probabilities", "y", "message"),
    [
        ([[0.9, 0.2]], [0], "`probabilities` must be at least 0 and sum to 1 .* row 0 is not"),
        ([[0.5, 0.5], [1.5, -0.5]], [0, 0], "row 1 is not. Pass `logits.softmax"),
        ([[0.5, 0.5]], [2], "`y` must hold whole numbers of at least 0 and below 2"),
        ([[0.5, 0.5]], [0, 1], r"`y` must have shape \(N,\) = \(1,\).*, beside `probabilities`"),
    ],
)
def test_wrong_probabilities_and_classes(probabilities, y, message):
    with pytest.raises(ValueError, match=message):
        plot_reliability(torch.tensor(probabilities), y)


def test_coverage_over_its_level_with_two_standard_errors():
    levels, coverage = [0.5, 0.9], [0.4, 0.95]
    ax = plot_coverage(levels, coverage, num_examples=100)
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), np.column_stack([levels, coverage]))
    vertices = ax.collections[0].get_paths()[0].vertices
    # At one half the standard error of 100 examples is 0.05, and at 0.9 it is 0.03.
    for level, error in ((0.5, 0.05), (0.9, 0.03)):
        heights = vertices[np.isclose(vertices[:, 0], level), 1]
        np.testing.assert_allclose([heights.min(), heights.max()], level + 2 * error * np.r_[-1, 1])
    assert 0 <= vertices[:, 1].min() <= vertices[:, 1].max() <= 1
    assert not plot_coverage(levels, coverage).collections


@pytest.mark.parametrize(
    ("levels", "coverage", "message"),
    [
        ([50.0], [0.4], "`levels` must hold shares from 0 to 1"),
        ([0.5], {"a": [1.1]}, r"`coverage\['a'\]` must hold shares from 0 to 1"),
        ([0.5], [0.4, 0.5], "`levels` and `coverage` must have as many values"),
    ],
)
def test_wrong_coverage(levels, coverage, message):
    with pytest.raises(ValueError, match=message):
        plot_coverage(levels, coverage)
