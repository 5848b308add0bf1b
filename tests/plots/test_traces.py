"""The bound over steps and its running mean."""

import numpy as np
import pytest

from pyro_structvi.infer import History
from pyro_structvi.plots import plot_elbo


def mean_by_definition(values, window):
    before, after = (window - 1) // 2, window // 2
    size = len(values)
    return [values[max(0, i - before) : min(size, i + after + 1)].mean() for i in range(size)]


def plot(values):
    """Draw a bound, and a KL divergence of the same values."""
    return plot_elbo(History(elbo=[*values], kl=[*values]))


def test_numbers_and_their_running_mean():
    values = np.random.default_rng(0).normal(size=150)
    raw, mean = plot(values).lines[:2]
    np.testing.assert_array_equal(raw.get_xydata(), np.column_stack([np.arange(1, 151), values]))
    np.testing.assert_allclose(mean.get_ydata(), mean_by_definition(values, 3), atol=1e-12)


def test_a_window_of_one_step_draws_the_numbers_alone():
    line, _ = plot([3.0, 1.0]).lines
    assert line.get_ydata().tolist() == [3.0, 1.0]
    assert len(plot(np.arange(99.0)).lines) == 2


def test_the_first_steps_need_not_be_in_view():
    values = [-1000.0] + [0.0, 1.0] * 10
    ax = plot(values)
    assert ax.get_ylim() == (-0.05, 1.05)
    ax.autoscale()
    assert ax.get_ylim()[0] < -1000


def test_elbo_and_kl():
    history = History(elbo=[-9.0, -5.0, -4.0], kl=[3.0, 2.0, 1.0])
    ax = plot_elbo(history)
    assert ax.get_ylabel() == "nats"
    assert {line.get_label(): line.get_ydata().tolist() for line in ax.lines} == {
        "ELBO": history.elbo,
        "KL": history.kl,
    }


def test_histories_that_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"`history\.elbo` must hold at least one number"):
        plot_elbo(History())
    with pytest.raises(ValueError, match=r"`history\.elbo` and `history\.kl` must have as many"):
        plot_elbo(History(elbo=[1.0, 2.0], kl=[1.0]))
