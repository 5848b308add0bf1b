"""Values over a plane of two inputs, and data by class."""

import numpy as np
import pytest
import torch

from pyro_structvi.plots import plot_decision

GRID_X, GRID_Y = np.linspace(0, 2, 9), np.linspace(-1, 1, 5)
# Values that are the first input: contours are vertical lines at their level.
VALUES = np.tile(GRID_X / 2, (5, 1))


def test_contours_stand_where_the_values_are():
    ax = plot_decision(GRID_X, GRID_Y, VALUES)
    contours = ax.collections[0]
    assert contours.levels[0] <= 0 < 1 <= contours.levels[-1]
    assert len(contours.levels) > 6
    pairs = zip(contours.levels[:-1], contours.levels[1:], contours.get_paths(), strict=True)
    for low, high, path in pairs:
        np.testing.assert_allclose(
            [path.vertices[:, 0].min(), path.vertices[:, 0].max()], [2 * low, 2 * high], atol=1e-12
        )
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 2), (-1, 1))


def test_rows_are_second_inputs():
    values = np.tile(GRID_Y[:, None], (1, 9))
    path = plot_decision(GRID_X, GRID_Y, values).collections[0].get_paths()[0]
    assert path.vertices[:, 1].max() < 0 < 2 == path.vertices[:, 0].max()


def test_data_are_drawn_by_class_and_the_colour_bar_says_what_the_values_are():
    x, y = torch.rand(6, 2), torch.tensor([2, 0, 2, 2, 0, 0])
    ax = plot_decision(GRID_X, GRID_Y, VALUES, x, y, label="entropy (nats)")
    assert ax.figure.axes[-1].get_ylabel() == "entropy (nats)"
    groups = {points.get_label(): points.get_offsets() for points in ax.collections[1:]}
    assert [*groups] == ["class 0", "class 2"]
    np.testing.assert_array_equal(groups["class 0"], x[y == 0])
    np.testing.assert_array_equal(groups["class 2"], x[y == 2])
    alone = plot_decision(GRID_X, GRID_Y, VALUES, x).collections[1]
    np.testing.assert_array_equal(alone.get_offsets(), x)


def test_values_that_are_all_the_same():
    ax = plot_decision(GRID_X, GRID_Y, np.full((5, 9), 0.25))
    assert ax.collections[0].get_paths()[0].vertices.size > 0
    ax.figure.draw_without_rendering()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (GRID_X, GRID_Y, VALUES.T),
            r"`values` must have shape \(B, A\) = \(5, 9\), a row for each",
        ),
        ((GRID_X[::-1], GRID_Y, VALUES), "`grid_x` must hold at least two numbers that ascend"),
        ((GRID_X, GRID_Y[:1], VALUES[:1]), "`grid_y` must hold at least two numbers"),
        (
            (GRID_X, GRID_Y, VALUES, np.ones((3, 3))),
            r"`x` must have shape \(N, 2\), but got \(3, 3",
        ),
        ((GRID_X, GRID_Y, VALUES, None, [0]), "`y` needs the inputs `x` of the data"),
        ((GRID_X, GRID_Y, VALUES, np.ones((3, 2)), [0, 1]), r"`y` must have shape \(N,\) = \(3,\)"),
        ((GRID_X, GRID_Y, VALUES, np.ones((1, 2)), [0.5]), "`y` must hold whole numbers"),
    ],
)
def test_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        plot_decision(*arguments)
