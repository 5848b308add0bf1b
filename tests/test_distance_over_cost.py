"""Posteriors by cost and distance, and the places of their names."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure
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


@pytest.mark.parametrize(
    ("rows", "floor", "scales"),
    [
        ({"a": (1.0, 0.5), "b": (7.0, 0.1)}, None, ("linear", "linear")),
        ({"a": (1.0, 0.5), "b": (9.0, 0.1)}, None, ("log", "linear")),
        ({"a": (1.0, 0.5), "b": (2.0, 0.1)}, 0.05, ("linear", "log")),
        ({"a": (1.0, 0.5), "b": (2.0, 0.0)}, None, ("linear", "linear")),
    ],
)
def test_wide_axes_are_logarithmic(rows, floor, scales):
    ax = plot_distance_over_cost(rows, floor=floor)
    assert (ax.get_xscale(), ax.get_yscale()) == scales


@pytest.mark.parametrize("spread", [0.2, pytest.param(2.0, marks=pytest.mark.slow)])
def test_names_do_not_cover_each_other_or_points(spread):
    ax = plot_distance_over_cost(many_rows(spread))
    ax.figure.draw_without_rendering()
    # Of an annotation with a line, the extent of the text alone.
    boxes = [super(Annotation, text).get_window_extent() for text in names_in(ax)]
    assert len(boxes) == 20
    assert max(shared(a, b) for a, b in itertools.combinations(boxes, 2)) == 0
    places = ax.transData.transform(ax.lines[0].get_xydata())
    assert not [box for box in boxes for x, y in places if box.contains(x, y)]
    inside = ax.get_window_extent()
    assert all(shared(box, inside) == pytest.approx(box.width * box.height) for box in boxes)


@pytest.mark.slow
def test_a_name_that_stands_far_away_has_a_line_to_its_point():
    texts = names_in(plot_distance_over_cost(many_rows(0.2)))
    far = [text for text in texts if np.hypot(*text.xyann) > 8.01]
    assert far
    assert all((text.arrow_patch is not None) == (text in far) for text in texts)


@pytest.mark.slow
def test_no_line_runs_through_the_name_of_another_point():
    rows = {f"number {index:02}": row for index, row in enumerate(many_rows(0.1).values())}
    ax = plot_distance_over_cost(rows, Figure(figsize=(5, 3.2)).subplots())
    ax.figure.draw_without_rendering()
    texts = names_in(ax)
    boxes = {text: super(Annotation, text).get_window_extent() for text in texts}
    lines = {text: text.arrow_patch for text in texts if text.arrow_patch is not None}
    assert lines
    crossed = [
        (text.get_text(), other.get_text())
        for text, line in lines.items()
        for other, box in boxes.items()
        if other is not text
        and line.get_path().transformed(line.get_transform()).intersects_bbox(box, filled=False)
    ]
    assert crossed == []


def test_a_name_alone_stands_right_beside_its_point():
    (text,) = names_in(plot_distance_over_cost({"a": (1.0, 0.5)}, ax=Figure().subplots()))
    assert (text.xyann, text.get_horizontalalignment()) == ((5, 0), "left")
