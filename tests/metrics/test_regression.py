"""Scores of predicted numbers, against closed forms for normals and the definition."""

import sys
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import root_mean_squared_error
from torch.distributions import Normal

from pyro_structvi.metrics import regression_scores
from tests.predictions import normal_prediction


def crps_of_a_normal(mean, scale, y):
    """Gneiting and Raftery (2007), the equation after Eq. 21."""
    z, unit = (y - mean) / scale, Normal(0.0, 1.0)
    return scale * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - torch.pi**-0.5)


def crps_by_pairs(draws, y):
    gaps = (draws.unsqueeze(0) - draws.unsqueeze(1)).abs().sum((0, 1))
    return (draws - y).abs().mean(0) - gaps / (2 * len(draws) * (len(draws) - 1))


@pytest.mark.parametrize("count", [2, 50])
def test_crps_is_the_fair_estimate(count, monkeypatch):
    y, draws = torch.randn(6, 2), torch.randn(count, 6, 2)
    draws[:, 0] = draws[:1, 0]  # ties
    prediction = normal_prediction(torch.zeros(6, 2), 1.0, y)
    monkeypatch.setattr(type(prediction), "sample_observations", lambda self: draws)
    expected = crps_by_pairs(draws, y).mean().item()
    assert regression_scores(prediction, y).crps == pytest.approx(expected, abs=1e-12)


def test_log_densities_are_finite_or_minus_infinity():
    y = torch.zeros(2)
    prediction = normal_prediction(y, 1.0, y)
    none = replace(prediction, log_density=torch.tensor([-1.0, -torch.inf]))
    assert regression_scores(none, y).log_density == -torch.inf
    for wrong in (torch.nan, torch.inf):
        given = replace(prediction, log_density=torch.tensor([-1.0, wrong]))
        with pytest.raises(ValueError, match=r"`prediction\.log_density` must be finite or minus"):
            regression_scores(given, y)


@pytest.mark.parametrize("name", ["torchmetrics.functional", "scoringrules"])
def test_a_missing_library_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    y = torch.zeros(2)
    library = name.partition(".")[0]
    with pytest.raises(ImportError, match=rf'{library} is needed: .*pyro-structvi\[metrics\]"'):
        regression_scores(normal_prediction(y, 1.0, y), y)


def test_all_scores_of_normals():
    shape = 100, 3
    mean, scale = torch.randn(shape), 0.5 + torch.rand(shape)
    y = mean + scale * torch.randn(shape)
    density = Normal(mean, scale).log_prob(y).reshape(len(y), -1).sum(-1)
    prediction = normal_prediction(mean, scale, y, draws=200)
    scores = regression_scores(prediction, y, level=0.9)
    rmse = root_mean_squared_error(y.flatten(), mean.flatten())
    assert scores.rmse == pytest.approx(rmse, abs=1e-12)
    assert scores.log_density == pytest.approx(density.mean().item(), abs=1e-12)
    reach = 1.6448536269514722
    inside = ((y - mean).abs() <= reach * scale).double().mean().item()
    assert scores.coverage == pytest.approx(inside, abs=1e-12)
    assert scores.width == pytest.approx(2 * reach * scale.mean().item(), abs=1e-12)
    # A score has a deviation below 1 over 200 draws, and 300 are averaged: 6 standard errors. Of a
    # single draw there are 100 observations.
    expected = crps_of_a_normal(mean, scale, y).mean().item()
    assert scores.crps == pytest.approx(expected, abs=6 / (200 * 300) ** 0.5)
    single = regression_scores(normal_prediction(mean, scale, y), y)
    assert single.crps == pytest.approx(expected, abs=6 / (100 * 300) ** 0.5)
    assert single.width == pytest.approx(2 * 1.959963984540054 * scale.mean().item(), abs=1e-12)


def test_what_a_prediction_must_have():
    y = torch.randn(4, 1)
    prediction = normal_prediction(torch.zeros(4, 1), 1.0, y)
    with pytest.raises(ValueError, match=r"`prediction` must have a log density.*y=y\)"):
        regression_scores(replace(prediction, log_density=None), y)
    with pytest.raises(ValueError, match="`level` must be strictly between 0 and 1, but got 0"):
        regression_scores(prediction, y, level=0)
