"""Posteriors by cost and distance, and the places of their names."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Annotation

from benchmarks.distance_over_cost import plot_distance_over_cost


def names_in(ax):
    return [child for child in ax.texts if child.get_text() not in {"floor", "ceiling"}]


def many_rows(spread):
    rng = np.random.default_rng(0)
    costs, distances = np.exp(rng.normal(3, spread, 20)), 0.5 + 0.1 * rng.normal(size=20)
    return {
        f"posterior with number {index}": (float(cost), float(distance))
        for index, (cost, distance) in enumerate(zip(costs, distances, strict=True))
    }


def shared(a, b):
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0) * max(height, 0)


def test_points_error_bars_and_lines():
    rows = {"a": (1.0, 0.5), "b": (3.0, 0.2)}
    ax = plot_distance_over_cost(rows, errors={"b": 0.1}, floor=0.1, ceiling=0.9, unit="min")
    points, _, (bars,) = ax.containers[0]
    np.testing.assert_array_equal(points.get_xydata(), [*rows.values()])
    np.testing.assert_allclose(bars.get_segments(), [[[1, 0.5], [1, 0.5]], [[3, 0.1], [3, 0.3]]])
    assert [line.get_ydata() for line in ax.lines[1:]] == [[0.1, 0.1], [0.9, 0.9]]
    texts = {text.get_text(): text.xy for text in ax.texts}
    assert texts == {"floor": (1, 0.1), "ceiling": (1, 0.9), **rows}
    assert ax.get_xlabel() == "cost of training (min)"


def test_names_do_not_cover_each_other_or_points():
    ax = plot_distance_over_cost(many_rows(0.2))
    ax.figure.draw_without_rendering()
    # Of an annotation with a line, the extent of the text alone.
    boxes = [super(Annotation, text).get_window_extent() for text in names_in(ax)]
    assert len(boxes) == 20
    assert max(shared(a, b) for a, b in itertools.combinations(boxes, 2)) == 0
    places = ax.transData.transform(ax.lines[0].get_xydata())
    assert not [box for box in boxes for x, y in places if box.contains(x, y)]
    inside = ax.get_window_extent()
    assert all(shared(box, inside) == pytest.approx(box.width * box.height) for box in boxes)
