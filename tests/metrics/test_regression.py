"""Scores of predicted numbers, against closed forms for normals and the definition."""

from dataclasses import replace

import pytest
import torch
from scipy.integrate import quad
from sklearn.metrics import root_mean_squared_error
from torch.distributions import Normal

import pyro_structvi as ps
from pyro_structvi.metrics import (
    crps,
    interval_coverage,
    interval_width,
    log_predictive_density,
    regression_scores,
    rmse,
)
from tests.predictions import normal_prediction


def crps_of_a_normal(mean, scale, y):
    """Gneiting and Raftery (2007), the equation after Eq. 21."""
    z, unit = (y - mean) / scale, Normal(0.0, 1.0)
    return scale * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - torch.pi**-0.5)


def crps_by_pairs(draws, y):
    gaps = (draws.unsqueeze(0) - draws.unsqueeze(1)).abs().sum((0, 1))
    return (draws - y).abs().mean(0) - gaps / (2 * len(draws) * (len(draws) - 1))


@pytest.mark.parametrize("shape", [(7,), (3, 2), ()])
@pytest.mark.parametrize("count", [2, 3, 50])
def test_crps_by_sorting_is_that_by_pairs(shape, count):
    draws, y = torch.randn(count, *shape), torch.randn(shape)
    torch.testing.assert_close(crps(draws, y), crps_by_pairs(draws, y), rtol=0, atol=1e-12)
    far = crps(draws + 1e6, y + 1e6)
    torch.testing.assert_close(far, crps(draws, y), rtol=0, atol=1e-9)  # rounding of the sums


def test_crps_of_ties():
    draws = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0]).unsqueeze(-1)
    y = torch.tensor([2.0])
    torch.testing.assert_close(crps(draws, y), crps_by_pairs(draws, y), rtol=0, atol=1e-12)


def test_crps_is_unbiased_for_few_draws():
    # 400,000 pairs of standard normal draws: 5 standard errors, P(false alarm) = 6e-7.
    y = torch.full((400_000,), 0.3)
    scores = crps(torch.randn(2, len(y)), y)
    error = scores.mean() - crps_of_a_normal(0.0, 1.0, y[0])
    assert error.abs() < 5 * scores.std() / len(y) ** 0.5


def test_crps_of_a_normal_in_closed_form():
    mean, scale = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([1.0, 0.5, 3.0])
    y = torch.tensor([0.5, 3.0, -2.0])
    quantiles = (torch.arange(20_000) + 0.5) / 20_000
    draws = mean + scale * torch.special.ndtri(quantiles).unsqueeze(-1)
    expected = crps_of_a_normal(mean, scale, y)
    # The tails beyond the last quantile, 1/40,000, and the fair factor S / (S - 1): below 1e-4.
    torch.testing.assert_close(crps(draws, y), expected, rtol=0, atol=1e-4 * 3)


def test_the_closed_form_is_the_integral():
    unit, y = Normal(0.0, 1.0), 0.7
    below = quad(lambda t: unit.cdf(torch.tensor(t)).item() ** 2, -12, y)[0]
    above = quad(lambda t: (1 - unit.cdf(torch.tensor(t)).item()) ** 2, y, 12)[0]
    closed = crps_of_a_normal(0.0, 1.0, torch.tensor(y)).item()
    assert closed == pytest.approx(below + above, abs=1e-10)


def test_certain_draws_have_the_absolute_error():
    assert crps(torch.full((5, 2), 3.0), torch.tensor([1.0, 3.5])).tolist() == [2.0, 0.5]


def test_rmse_is_that_of_scikit_learn():
    mean, y = torch.randn(30, 2), torch.randn(30, 2)
    expected = root_mean_squared_error(y.flatten(), mean.flatten())
    assert rmse(mean, y) == pytest.approx(expected, abs=1e-12)


def test_log_predictive_density():
    assert log_predictive_density(torch.tensor([-1.0, -2.5])) == -1.75
    assert log_predictive_density(torch.tensor([-1.0, -torch.inf])) == -torch.inf
    with pytest.raises(ValueError, match=r"`log_density` must have one number.*logsumexp\(0\)"):
        log_predictive_density(torch.zeros(5, 2))
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="`log_density` must be finite"):
            log_predictive_density(torch.tensor([-1.0, wrong]))


def test_intervals_have_their_ends():
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 4.0])
    assert interval_coverage(lower, upper, torch.tensor([0.0, 1.0, 1.1, 0.9])) == 0.5
    assert interval_width(lower, upper) == 1.5
    for call in (
        lambda: interval_width(upper, lower),
        lambda: interval_coverage(upper, lower, lower),
    ):
        with pytest.raises(ValueError, match="`lower` must be at most `upper`"):
            call()


@pytest.mark.parametrize("shape", [(300,), (100, 3)])
def test_all_scores_of_normals(shape):
    mean, scale = torch.randn(shape), 0.5 + torch.rand(shape)
    y = mean + scale * torch.randn(shape)
    density = Normal(mean, scale).log_prob(y).reshape(len(y), -1).sum(-1)
    prediction = normal_prediction(mean, scale, y, draws=200)
    scores = regression_scores(prediction, y, level=0.9)
    assert scores.rmse == rmse(mean, y)
    assert scores.log_density == pytest.approx(density.mean().item(), abs=1e-12)
    reach = 1.6448536269514722
    inside = ((y - mean).abs() <= reach * scale).double().mean().item()
    assert scores.coverage == pytest.approx(inside, abs=1e-12)
    assert scores.width == pytest.approx(2 * reach * scale.mean().item(), abs=1e-12)
    # A score has a deviation below 1 over 200 draws, and 300 are averaged: 6 standard errors.
    expected = crps_of_a_normal(mean, scale, y).mean().item()
    assert scores.crps == pytest.approx(expected, abs=6 / (200 * 300) ** 0.5)
    wider = regression_scores(prediction, y)
    assert wider.width == pytest.approx(2 * 1.959963984540054 * scale.mean().item(), abs=1e-12)


def test_a_single_draw_gives_100_observations():
    mean, scale = torch.zeros(5000), torch.ones(5000)
    y = torch.randn(5000)
    prediction = normal_prediction(mean, scale, y)
    scores = regression_scores(prediction, y)
    # As above, with 100 observations for each of 5000 targets.
    expected = crps_of_a_normal(mean, scale, y).mean().item()
    assert scores.crps == pytest.approx(expected, abs=6 / (100 * 5000) ** 0.5)


def test_what_a_prediction_must_have():
    y = torch.randn(4, 1)
    prediction = normal_prediction(torch.zeros(4, 1), 1.0, y)
    with pytest.raises(ValueError, match=r"`prediction` must have a log density.*y=y\)"):
        regression_scores(replace(prediction, log_density=None), y)
    with pytest.raises(
        TypeError, match=r"`prediction` must be a Prediction, but got a torch\.Tensor"
    ):
        regression_scores(y, y)
    with pytest.raises(ValueError, match=r"`y` must have shape that of `mean` = \(4, 1\)"):
        regression_scores(prediction, y.squeeze(-1))
    with pytest.raises(ValueError, match="`level` must be strictly between 0 and 1, but got 0"):
        regression_scores(prediction, y, level=0)


def test_scores_of_what_predict_returns():
    """A linear function with a normal posterior predicts N(m x, s^2 x^2 + noise^2) exactly."""
    x = torch.tensor([[-2.0], [0.0], [1.0], [3.0]])
    y = torch.tensor([[-1.0], [0.2], [2.0], [0.5]])
    net = ps.bayesianize(torch.nn.Linear(1, 1, bias=False), prior=1.0)
    model = ps.Regressor(net, num_data=4, noise_scale=0.5)
    guide = ps.MeanFieldGuide(model, init_loc_fn=lambda site: torch.ones(1, 1), init_scale=0.3)
    prediction = ps.predict(model, guide, x, num_samples=20_000, y=y)
    scale = (0.09 * x.square() + 0.25).sqrt()
    scores, exact = regression_scores(prediction, y), Normal(x, scale)
    # Averages over 20,000 draws: 5 standard errors, of a density's ratio, an end and a score.
    assert scores.rmse == pytest.approx(rmse(x, y), abs=5 * 0.9 / 20_000**0.5)
    assert scores.log_density == pytest.approx(exact.log_prob(y).mean().item(), abs=0.04)
    assert scores.width == pytest.approx(2 * 1.959964 * scale.mean().item(), rel=0.02)
    inside = ((y - x).abs() <= 1.959964 * scale).double().mean().item()
    assert scores.coverage == inside == 0.75
    expected = crps_of_a_normal(x, scale, y).mean().item()
    assert scores.crps == pytest.approx(expected, abs=5 / 20_000**0.5)


def test_draws_must_fit():
    with pytest.raises(ValueError, match=r"`draws` must have shape \(S, \*y.shape\) = \(5, 3\)"):
        crps(torch.zeros(5, 2), torch.zeros(3))
    with pytest.raises(
        ValueError, match="`draws` must hold at least 2 draws of each target, but got 1"
    ):
        crps(torch.zeros(1, 3), torch.zeros(3))


def test_scores_are_computed_in_double():
    draws, y = torch.randn(50, 7).half(), torch.randn(7).half()
    assert torch.equal(crps(draws, y), crps(draws.double(), y.double()))
    assert rmse(draws[0], y) == rmse(draws[0].double(), y.double())
