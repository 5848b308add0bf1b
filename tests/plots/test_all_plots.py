"""What all figures share: axes that are given, figures of no window, labels, legends."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from pyro_structvi import plots
from pyro_structvi.infer import History
from pyro_structvi.plots.figures import COLOURS, CURVES
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


def styles_of(ax):
    """Return colour and line style by label."""
    lines = (line for line in ax.lines if not line.get_label().startswith("_"))
    return {line.get_label(): (line.get_color(), line.get_linestyle()) for line in lines}


def test_curves_differ_by_colour_and_then_by_style():
    curves = {f"curve {number}": [0.5] for number in range(4 * len(COLOURS))}
    styles = styles_of(plots.plot_coverage([0.5], curves))
    assert styles.pop("calibrated") not in styles.values()
    assert len(set(styles.values())) == len(curves) == len(CURVES)
    assert [style[0] for style in styles.values()][: len(COLOURS)] == list(COLOURS)
    more = curves | {f"more {number}": [0.5] for number in range(len(COLOURS))}
    styles = styles_of(plots.plot_coverage([0.5], more))
    del styles["calibrated"]
    assert [*styles.values()][len(CURVES) :] == [*styles.values()][: len(COLOURS)]


def test_a_second_call_on_the_same_axes_draws_another_colour_and_one_diagonal_in_the_legend():
    draws = {
        "posterior": lambda label, ax: plots.plot_importance([0.0, 1.0], ax, label),
        "calibrated": lambda label, ax: plots.plot_coverage([0.5], [0.4], ax, label),
    }
    for diagonal, draw_curve in draws.items():
        ax = draw_curve("b", draw_curve("a", None))
        assert len(set(styles_of(ax).values())) == 3
        assert [text.get_text() for text in ax.get_legend().get_texts()] == [diagonal, "a", "b"]
    data = {"widths": (1,), "data_x": [0.5], "data_y": [0.5], "truth": [1.0, 1.0]}
    ax = plots.plot_band([0.0, 1.0], [0.0, 1.0], [0.1, 0.2], label="a", **data)
    plots.plot_band([0.0, 1.0], [1.0, 0.0], [0.1, 0.2], ax, (1,), label="b")
    styles, filled = styles_of(ax), [to_hex(each.get_facecolor()[0]) for each in ax.collections]
    assert [filled[0].upper(), filled[2].upper()] == [styles["a"][0], styles["b"][0]]
    assert len({*filled, to_hex(styles["truth"][0])}) == 4  # with the data's
    for _ in range(2):
        ax = plots.plot_elbo(History(elbo=[-2.0, -1.0], kl=[1.0, 1.0]), ax)
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == len(ax.lines)


@pytest.mark.parametrize(("layout", "beside"), [("constrained", True), (None, False)])
def test_a_legend_stands_beside_the_axes_where_the_layout_makes_room(layout, beside):
    ax = Figure(layout=layout).subplots()
    plots.plot_importance([1.0, 2.0], ax)
    ax.figure.draw_without_rendering()
    legend, axes = ax.get_legend().get_window_extent(), ax.get_window_extent()
    assert bool(legend.x0 > axes.x1) == beside
    assert legend.x1 < ax.figure.bbox.x1


def test_masked_entries_are_not_drawn():
    values = np.ma.masked_array([0.0, 99.0, 2.0], mask=[False, True, False])
    with pytest.raises(
        ValueError, match=r"`mean` must have no masked entries, .*`mean\[~mean\.mask"
    ):
        plots.plot_band([0.0, 1.0, 2.0], values, [0.1] * 3)
    assert len(plots.plot_importance(values[~values.mask]).lines[0].get_xdata()) == 2


def test_tensors_arrays_and_lists_are_drawn_alike():
    numbers = [0.125, 0.25, 0.5]
    given = [numbers, np.array(numbers, "float32"), torch.tensor(numbers, requires_grad=True)]
    lines = [plots.plot_band(values, values, values).lines[0].get_ydata() for values in given]
    assert [line.tolist() for line in lines] == [numbers] * 3
