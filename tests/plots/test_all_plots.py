"""What all figures share: axes that are given, figures of no window, labels, legends."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_structvi import plots
from pyro_structvi.plots.figures import COLOURS, curve_style
from tests.bad_input.cases import VALID

OF_ONE_AXES = sorted(set(plots.__all__) - {"plot_scale_matrix"})


def draw(name, ax):
    arguments = {key: value for key, value in VALID[name]().items() if key != "ax"}
    return getattr(plots, name)(**arguments, ax=ax)


@pytest.mark.parametrize("name", OF_ONE_AXES)
def test_axes_are_used_returned_and_keep_their_labels(name, tmp_path):
    """In a part of a figure, too; without axes there is a figure of no window."""
    part = Figure(layout="constrained").subfigures(1, 2)[1]
    first, second = part.subplots(1, 2)
    second.set_xlabel("horizontal")
    second.set_ylabel("vertical")
    assert draw(name, second) is second
    assert second.has_data()
    assert not first.has_data()
    assert (second.get_xlabel(), second.get_ylabel()) == ("horizontal", "vertical")
    second.get_figure(root=True).draw_without_rendering()
    ax = draw(name, None)
    assert type(ax.figure) is Figure
    assert ax.figure.canvas.manager is None
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    ax.figure.savefig(tmp_path / "figure.png", dpi=50)


def test_axes_that_were_removed():
    ax = Figure().subplots()
    ax.remove()
    with pytest.raises(ValueError, match="`ax` must belong to a figure, but was removed"):
        plots.plot_importance([1.0], ax)


def test_curves_differ_by_colour_and_then_by_style():
    styles = [tuple(curve_style(index).values()) for index in range(4 * len(COLOURS))]
    assert len(set(styles)) == len(styles)
    assert [style[0] for style in styles[: len(COLOURS)]] == list(COLOURS)


@pytest.mark.parametrize(("layout", "beside"), [("constrained", True), (None, False)])
def test_a_legend_stands_beside_the_axes_where_the_layout_makes_room(layout, beside):
    ax = Figure(layout=layout).subplots()
    plots.plot_importance([1.0, 2.0], ax)
    ax.figure.draw_without_rendering()
    legend, axes = ax.get_legend().get_window_extent(), ax.get_window_extent()
    assert bool(legend.x0 > axes.x1) == beside
    assert legend.x1 < ax.figure.bbox.x1


def test_tensors_arrays_and_lists_are_drawn_alike():
    numbers = [0.125, 0.25, 0.5]
    given = [numbers, np.array(numbers, "float32"), torch.tensor(numbers, requires_grad=True)]
    lines = [plots.plot_band(values, values, values).lines[0].get_ydata() for values in given]
    assert [line.tolist() for line in lines] == [numbers] * 3
