"""What all figures share, and what each of them shows."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_structvi import plots
from pyro_structvi.infer import History
from pyro_structvi.plots import (
    plot_band,
    plot_coverage,
    plot_elbo,
    plot_importance,
    plot_reliability,
    plot_scale_matrix,
)
from pyro_structvi.plots.figures import COLOURS, curve_style
from pyro_structvi.plots.predictions import DEPTH
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
    numbers = [0.5, 0.25, 0.125]
    given = [numbers, np.array(numbers, "float32"), torch.tensor(numbers, requires_grad=True)]
    lines = [plots.plot_band(values, values, values).lines[0].get_ydata() for values in given]
    assert [line.tolist() for line in lines] == [numbers] * 3


WRONG = (
    ([], r"`levels` must hold at least one number, in 1 .*shape \(0,\)"),
    (np.ones((2, 2)), r"in 1 dimension, but got the shape \(2, 2\)"),
    ([1.0, np.nan], "`levels` must be finite everywhere"),
)


def test_other_values_and_mappings_are_refused():
    for values, message in WRONG:
        with pytest.raises(ValueError, match=message):
            plots.plot_coverage(values, [0.5])
    with pytest.raises(ValueError, match="`label` must be None where `coverage` is a mapping"):
        plots.plot_coverage([0.5], {"guide": [0.4]}, label="guide")
    ax = Figure().subplots()
    ax.remove()
    with pytest.raises(ValueError, match="`ax` must belong to a figure, but was removed"):
        plots.plot_importance([1.0], ax)


# ---- bands ---------------------------------------------------------------------------------------


INPUTS = np.array([0.0, 1.0, 3.0])
MEAN = np.array([1.0, -1.0, 0.5])
SCALE = np.array([0.1, 0.0, 0.4])


def ends(band):
    """Return the lower and the upper ends of a band, by its vertices at each input."""
    vertices = band.get_paths()[0].vertices
    heights = [vertices[vertices[:, 0] == x, 1] for x in INPUTS]
    return np.array([each.min() for each in heights]), np.array([each.max() for each in heights])


def test_bands_are_the_mean_and_multiples_of_the_scale():
    ax = plot_band(INPUTS, MEAN, SCALE, widths=(0.5, 2.0))
    assert len(ax.collections) == 2
    for band, width in zip(ax.collections, (0.5, 2.0), strict=True):
        np.testing.assert_allclose(ends(band), (MEAN - width * SCALE, MEAN + width * SCALE))
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), np.column_stack([INPUTS, MEAN]))


def test_bands_by_their_ends_with_data_and_truth():
    lower, upper = MEAN - np.array([[1.0], [0.5]]), MEAN + np.array([[2.0], [0.25]])
    truth, points = MEAN + 0.1, ([0.5, 2.0], [7.0, 8.0])
    ax = plot_band(
        INPUTS, MEAN, lower=lower, upper=upper, data_x=points[0], data_y=points[1], truth=truth
    )
    *bands, data = ax.collections
    for band, low, high in zip(bands, lower, upper, strict=True):
        np.testing.assert_allclose(ends(band), (low, high))
    np.testing.assert_array_equal(data.get_offsets(), np.transpose(points))
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), truth)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["mean", "truth", "data"]
    assert len(plot_band(INPUTS, MEAN, lower=lower[0], upper=upper[0]).collections) == 1


WRONG_BANDS = (
    ({}, "Either `scale` or both `lower` and `upper` must be given"),
    ({"scale": SCALE, "lower": INPUTS, "upper": INPUTS}, "Either `scale` or both `lower`"),
    ({"lower": MEAN}, "Either `scale` or both `lower` and `upper`"),
    ({"scale": SCALE[:2]}, "`mean` and `scale` must have as many values, but got 3 and 2"),
    ({"lower": MEAN, "upper": MEAN - 1}, "`lower` must be at most `upper`"),
    ({"lower": np.stack([MEAN, MEAN]), "upper": MEAN}, "as many bands, but got 2 and 1"),
    ({"scale": SCALE, "data_x": INPUTS}, "`data_x` and `data_y` must be given together"),
    (
        {"scale": SCALE, "data_x": INPUTS, "data_y": INPUTS[:1]},
        "`data_x` and `data_y` must have as many",
    ),
)


def test_wrong_bands():
    for options, message in WRONG_BANDS:
        with pytest.raises(ValueError, match=message):
            plot_band(INPUTS, MEAN, **options)


# ---- reliability and coverage --------------------------------------------------------------------


def drawn_bins(ax):
    """Return by bin, of those that are drawn: left end, accuracy, share below the axis, confidence."""
    accuracy, share = ax.containers
    marks = ax.collections[0].get_segments()
    return [
        (bar.get_x(), bar.get_height(), -below.get_height(), mark[0][1])
        for bar, below, mark in zip(accuracy, share, marks, strict=True)
    ]


def bins_by_definition(probabilities, y, num_bins):
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
    ax = plot_reliability(probabilities, [0, 0, 1, 0], num_bins=4)
    assert drawn_bins(ax) == [
        *((0.25, 1.0, DEPTH / 2, 0.5), (0.5, 1.0, DEPTH / 2, 0.75), (0.75, 0.5, DEPTH, 1)),
    ]
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), [[0, 0], [1, 1]])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "share of examples,\ntallest 50%" in texts
    for wrong, y, message in (
        ([[0.5, 0.5], [1.5, -0.5]], [0, 0], "row 1 is not. Pass `logits.softmax"),
        ([[0.5, 0.5]], [2], "`y` must hold whole numbers of at least 0 and below 2"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_reliability(torch.tensor(wrong), y)


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
    with pytest.raises(ValueError, match=r"`coverage\['a'\]` must hold shares from 0 to 1"):
        plot_coverage([0.5], {"a": [1.1]})
    with pytest.raises(ValueError, match="`levels` must hold shares from 0 to 1"):
        plot_coverage([50.0], [0.4])
    with pytest.raises(ValueError, match="`levels` and `coverage` must have as many values"):
        plot_coverage([0.5], coverage)


# ---- importance weights --------------------------------------------------------------------------


def test_the_curve_by_its_definition():
    log_weights = torch.randn(50) - 2000.0  # exponentials of these are zero
    weights = sorted((log_weights + 2000.0).exp().tolist(), reverse=True)
    ax = plot_importance(log_weights, label="k-tied")
    held = [sum(weights[:count]) / sum(weights) for count in range(51)]
    expected = np.column_stack([np.arange(51) / 50, held])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), expected, atol=1e-12)
    assert [line.get_label() for line in ax.lines] == ["posterior", "k-tied"]


# ---- standard deviations -------------------------------------------------------------------------


def near_rank_one(rows=30, columns=12):
    rng = np.random.default_rng(0)
    rank_one = np.outer(rng.uniform(0.5, 2, rows), rng.uniform(0.5, 2, columns))
    return rank_one * np.exp(0.1 * rng.normal(size=(rows, columns)))


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
    message = "`ranks` must hold at least one number, all from 1 to 12"
    with pytest.raises(ValueError, match=message):
        plot_scale_matrix(near_rank_one(), (1, 13))


# ---- bounds over steps ---------------------------------------------------------------------------


def mean_by_definition(values, window):
    before, after = (window - 1) // 2, window // 2
    size = len(values)
    return [values[max(0, i - before) : min(size, i + after + 1)].mean() for i in range(size)]


def plot(values, ax=None, **options):
    return plot_elbo(History(elbo=[*values], kl=[*values]), ax, **options)


@pytest.mark.parametrize(("size", "smooth", "window"), [(20, 2, 2), (20, 50, 50), (150, None, 3)])
def test_numbers_and_their_running_mean(size, smooth, window):
    """By default the window is a fiftieth of the steps; of one step the numbers are alone."""
    values = np.random.default_rng(0).normal(size=size)
    raw, mean = plot(values, **{} if smooth is None else {"smooth": smooth}).lines[:2]
    steps = np.arange(1, size + 1)
    np.testing.assert_array_equal(raw.get_xydata(), np.column_stack([steps, values]))
    np.testing.assert_allclose(mean.get_ydata(), mean_by_definition(values, window), atol=1e-12)
    assert len(plot(values[:99], smooth=1).lines) == 2


def test_the_first_steps_need_not_be_in_view():
    values = [-1000.0] + [0.0, 1.0] * 10
    low, high = plot(values, start=0.1).get_ylim()
    assert (low, high) == (-0.05, 1.05)
    assert plot(values, start=0.0).get_ylim()[0] < -1000
    ax = plot(values, start=0.1)
    ax.autoscale()
    assert ax.get_ylim()[0] < -1000


def test_elbo_and_kl_in_total_and_by_site():
    history = History(elbo=[-9.0, -5.0, -4.0], kl=[3.0, 2.0, 1.0])
    lines = plot_elbo(history).lines
    assert {line.get_label(): line.get_ydata().tolist() for line in lines} == {
        "ELBO": history.elbo,
        "KL": history.kl,
    }
    by_site = {"weight": [2.0, 1.5, 0.5], "bias": [1.0, 0.5, 0.5]}
    ax = plot_elbo(history, kl_by_site=by_site)
    assert ax.get_ylabel() == "nats"
    assert [line.get_label() for line in ax.lines[2:]] == ["KL of weight", "KL of bias"]
    assert [line.get_ydata().tolist() for line in ax.lines[2:]] == [*by_site.values()]


def test_histories_that_cannot_be_drawn():
    history = History(elbo=[1.0, 2.0], kl=[1.0, 2.0])
    for own, by_site, message in (
        (History(), None, r"`history\.elbo` must hold at least one number"),
        (history, {"w": [1.0]}, r"`kl_by_site\['w'\]` must have one number a step, .* 2, but"),
        (History(elbo=[1.0, 2.0], kl=[1.0]), None, r"`history\.kl` must have one number a step"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_elbo(own, kl_by_site=by_site)
