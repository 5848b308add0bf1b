"""Figures of fits and posteriors: the bound over steps, shares of the total weight, deviations."""

import numpy as np
import pytest
import torch

from pyro_structvi.infer import History
from pyro_structvi.plots import plot_elbo, plot_importance, plot_scale_matrix


def plot(values):
    """Draw a bound, and a KL divergence of the same values."""
    return plot_elbo(History(elbo=[*values], kl=[*values]))


def test_numbers_and_their_running_mean_over_three_steps():
    values = np.random.default_rng(0).normal(size=150)
    raw, mean = plot(values).lines[:2]
    np.testing.assert_array_equal(raw.get_xydata(), np.column_stack([np.arange(1, 151), values]))
    expected = [values[max(0, i - 1) : i + 2].mean() for i in range(150)]
    np.testing.assert_allclose(mean.get_ydata(), expected, atol=1e-12)


@pytest.mark.parametrize("size", [100, 149, 251, 500, 777])
def test_running_means_do_not_round_to_the_size_of_the_first_values(size):
    values = np.random.default_rng(0).normal(size=size)
    values[0] = -1e20  # as of counts before training
    window = size // 50
    mean = plot(values).lines[1].get_ydata()
    first = np.arange(size) - (window - 1) // 2
    expected = [values[max(0, low) : low + window].mean() for low in first]
    np.testing.assert_allclose(mean, expected, rtol=1e-12, atol=1e-12)


def test_few_steps_have_no_running_mean():
    assert len(plot(np.arange(99.0)).lines) == 2
    history = History(elbo=[-9.0, -5.0, -4.0], kl=[3.0, 2.0, 1.0])
    ax = plot_elbo(history)
    assert ax.get_ylabel() == "nats"
    assert {line.get_label(): line.get_ydata().tolist() for line in ax.lines} == {
        "ELBO": history.elbo,
        "KL": history.kl,
    }


def test_the_first_steps_need_not_be_in_view():
    ax = plot([-1000.0] + [0.0, 1.0] * 10)
    assert ax.get_ylim() == (-0.05, 1.05)
    ax.autoscale()
    assert ax.get_ylim()[0] < -1000


def test_the_curve_of_weights_by_its_definition():
    log_weights = torch.randn(50) - 2000.0  # exponentials of these are zero
    weights = sorted((log_weights + 2000.0).exp().tolist(), reverse=True)
    ax = plot_importance(log_weights, label="k-tied")
    held = [sum(weights[:count]) / sum(weights) for count in range(51)]
    expected = np.column_stack([np.arange(51) / 50, held])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), expected, atol=1e-12)
    assert [line.get_label() for line in ax.lines] == ["posterior", "k-tied"]


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot_elbo(History()), r"`history\.elbo` must hold at least one number"),
        (
            lambda: plot_elbo(History(elbo=[1.0, 2.0], kl=[1.0])),
            r"`history\.elbo` and `history\.kl` must have as many",
        ),
        (lambda: plot_importance([0.0, -np.inf]), "`log_weights` must be finite everywhere"),
        (lambda: plot_scale_matrix(np.zeros((3, 3))), "`scale` must be positive everywhere, but"),
        *(
            (
                lambda ranks=ranks: plot_scale_matrix(near_rank_one(), ranks),
                "`ranks` must hold at least one number, all from 1 to 12",
            )
            for ranks in ((), (0,), (1, 13))
        ),
    ],
)
def test_what_cannot_be_drawn(call, message):
    with pytest.raises(ValueError, match=message):
        call()
