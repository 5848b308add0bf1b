"""The bound over steps and its running mean."""

import numpy as np
import pytest

from pyro_structvi.infer import History
from pyro_structvi.plots import plot_elbo


def mean_by_definition(values, window):
    before, after = (window - 1) // 2, window // 2
    size = len(values)
    return [values[max(0, i - before) : min(size, i + after + 1)].mean() for i in range(size)]


def plot(values, ax=None, **options):
    """Draw a bound, and a KL divergence of the same values."""
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
