"""Scores of several groups over the same bins."""

import numpy as np
import pytest

from pyro_structvi.plots import plot_histograms


def test_densities_over_the_same_bins():
    rng = np.random.default_rng(0)
    groups = {"in": rng.gamma(1, 0.2, 400), "out": rng.normal(1.4, 0.3, 150)}
    ax = plot_histograms(groups, num_bins=12)
    both = np.concatenate([*groups.values()])
    edges = np.linspace(both.min(), both.max(), 13)
    for patch, (name, scores) in zip(ax.patches, groups.items(), strict=True):
        data = patch.get_data()
        np.testing.assert_allclose(data.edges, edges)
        inside = (scores[:, None] >= edges[:-1]) & (scores[:, None] < edges[1:])
        inside[:, -1] |= scores == edges[-1]
        np.testing.assert_allclose(data.values, inside.mean(0) / np.diff(edges))
        assert patch.get_label() == name
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["in", "out"]


def test_scores_that_are_all_the_same():
    patch = plot_histograms({"in": [0.5, 0.5]}, num_bins=4).patches[0]
    data = patch.get_data()
    assert float((data.values * np.diff(data.edges)).sum()) == pytest.approx(1)


def test_no_group_and_an_empty_one():
    with pytest.raises(ValueError, match="`values` must hold at least one entry, but is empty"):
        plot_histograms({})
    with pytest.raises(ValueError, match=r"`values\['out'\]` must hold at least one number"):
        plot_histograms({"in": [1.0], "out": []})
