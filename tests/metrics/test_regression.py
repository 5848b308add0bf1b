"""Scores of predicted numbers, distances of posteriors, and conformal prediction."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from scipy.stats import wasserstein_distance
from sklearn.metrics import root_mean_squared_error
from torch.distributions import Normal

from pyro_structvi.diagnostics import expected_coverage
from pyro_structvi.metrics import (
    agreement,
    conformal_interval,
    conformal_sets,
    predictive_distance,
    regression_scores,
    total_variation,
    wasserstein,
)
from tests.predictions import normal_prediction


def crps_of_a_normal(mean, scale, y):
    """Gneiting and Raftery (2007), the equation after Eq. 21."""
    z, unit = (y - mean) / scale, Normal(0.0, 1.0)
    return scale * (z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - torch.pi**-0.5)


def expected_distance(mean, scale):
    """Return E|X| of a normal."""
    z, unit = mean / scale, Normal(0.0, 1.0)
    return 2 * scale * unit.log_prob(z).exp() + mean * (2 * unit.cdf(z) - 1)


def test_counts_are_scored_in_any_dtype():
    counts = torch.tensor([0, 3, 2, 9])
    prediction = normal_prediction(torch.tensor([1.0, 2.0, 2.5, 4.0]), 1.5, counts.double())
    found = []
    for y in (counts, counts.double()):
        torch.manual_seed(0)
        found.append(regression_scores(prediction, y))
    assert found[0] == found[1]
    assert expected_coverage(prediction, counts, [0.9])[0.9].observed == 0.75
    assert wasserstein(torch.tensor([[0], [1]]), torch.tensor([[3], [2]])) == 2.0


@pytest.mark.parametrize("draws", [1, 2, 5, 60])
def test_crps_is_that_of_the_mixture_of_its_draws(draws):
    """Members of an ensemble are no random draws: a fair estimate is 0.25 lower for two of them.

    The standard deviation of a score over the observations of a target is below 0.2.
    """
    mean, y = torch.randn(draws, 2000), torch.randn(2000)
    made = Normal(mean, 0.1)
    prediction = replace(normal_prediction(torch.zeros(2000), 1.0, y), likelihood=made)
    pairs = expected_distance(mean.unsqueeze(0) - mean.unsqueeze(1), 0.1 * 2**0.5).mean((0, 1))
    expected = (expected_distance(y - mean, 0.1).mean(0) - pairs / 2).mean().item()
    scores = regression_scores(prediction, y)
    assert scores.crps == pytest.approx(expected, abs=5 * 0.2 / (2000 * 100) ** 0.5)


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


def test_masked_targets_do_not_count():
    """Placeholders, of whole examples or of elements; scores are those of the observed ones."""
    mean, y = torch.randn(400), torch.randn(400)
    seen = torch.arange(400) % 4 > 0
    y[~seen] = -1e6
    prediction = normal_prediction(mean, 1.0, y)
    density = prediction.log_density.where(seen, 0.0)
    found = regression_scores(replace(prediction, log_density=density, observed=seen), y)
    known = regression_scores(normal_prediction(mean[seen], 1.0, y[seen]), y[seen])
    names = "rmse", "log_density", "coverage", "width"
    of_found, of_known = ([getattr(each, name) for name in names] for each in (found, known))
    assert of_found == pytest.approx(of_known, rel=1e-12)
    own = replace(prediction, observed=seen)
    coverage = expected_coverage(own, y, [0.9])[0.9]
    assert coverage == expected_coverage(normal_prediction(mean[seen], 1.0), y[seen], [0.9])[0.9]
    with pytest.raises(ValueError, match="`calibration` must have observed targets alone"):
        conformal_interval(own, own, y)
    expected = crps_of_a_normal(mean, 1.0, y)[seen].mean().item()
    assert found.crps == pytest.approx(expected, abs=6 / (100 * 300) ** 0.5)
    pairs = normal_prediction(mean.reshape(200, 2), 1.0, y.reshape(200, 2))
    pairs = replace(
        pairs, log_density=density.reshape(200, 2).sum(-1), observed=seen.reshape(200, 2)
    )
    of_pairs = regression_scores(pairs, y.reshape(200, 2))  # each has an observed element
    assert of_pairs.log_density == pytest.approx(density.sum().item() / 200, rel=1e-12)
    assert (of_pairs.rmse, of_pairs.coverage) == pytest.approx((known.rmse, known.coverage))
    with pytest.raises(ValueError, match="`prediction` must have an observed target"):
        regression_scores(replace(prediction, observed=torch.zeros(400, dtype=torch.bool)), y)


# ---- distances -----------------------------------------------------------------------------------


def by_scipy(ours, theirs):
    ours, theirs = ours.flatten(1).T.numpy(), theirs.flatten(1).T.numpy()
    each = [wasserstein_distance(a, b) for a, b in zip(ours, theirs, strict=True)]
    return sum(each) / len(each)


@pytest.mark.parametrize("sizes", [(40, 40), (40, 27), (1, 30)])
@pytest.mark.parametrize("digits", [0, 8])
def test_wasserstein_is_that_of_scipy(sizes, digits):
    ours, theirs = (torch.randn(size, 3, 2).round(decimals=digits) for size in sizes)
    assert wasserstein(ours, theirs) == pytest.approx(by_scipy(ours, theirs), abs=1e-12)
    assert wasserstein(theirs, ours) == pytest.approx(by_scipy(ours, theirs), abs=1e-12)
    if min(sizes) > 1 and digits:
        found = predictive_distance(ours, theirs).wasserstein
        assert found == pytest.approx(wasserstein(ours, theirs), abs=1e-12)


def test_distances_of_shifted_and_stretched_normals():
    quantiles = (torch.arange(4000) + 0.5) / 4000
    draws = torch.special.ndtri(quantiles).unsqueeze(-1).repeat(1, 2)
    shifted = predictive_distance(draws + 0.7, draws)
    assert shifted.mean_difference == pytest.approx(0.7)
    assert shifted.scale_ratio == pytest.approx(1.0)
    assert shifted.wasserstein == pytest.approx(0.7)
    stretched = predictive_distance(3 * draws[::2], draws)
    assert stretched.scale_ratio == pytest.approx(3.0, rel=2e-3)
    # W1 of N(0, 3^2) and N(0, 1) is 2 E|Z|.
    assert stretched.wasserstein == pytest.approx(2 * (2 / torch.pi) ** 0.5, rel=5e-3)


def test_what_does_not_fit_is_refused():
    y = torch.randn(4, 1)
    prediction = normal_prediction(torch.zeros(4, 1), 1.0, y)
    with pytest.raises(ValueError, match=r"`prediction` must have a log density.*y=y\)"):
        regression_scores(replace(prediction, log_density=None), y)
    with pytest.raises(ValueError, match="`level` must be strictly between 0 and 1, but got 0"):
        regression_scores(prediction, y, level=0)
    parts = [normal_prediction(torch.zeros(n), 1.0) for n in (3, 8)]
    with pytest.raises(ValueError, match="`y` must have shape"):
        conformal_interval(*parts, torch.randn(7))
    parts = [normal_prediction(torch.zeros(shape), 1.0) for shape in ((3, 2), (8, 1))]
    message = r"`prediction\.mean` must have shape \(N, \*event\) = \(3, 1\), but got \(3, 2\)"
    with pytest.raises(ValueError, match=message):
        conformal_interval(*parts, torch.randn(8, 1))
    some = torch.full((8, 2), 0.5)
    with pytest.raises(ValueError, match="`probabilities` must have shape"):
        conformal_sets(torch.full((4, 4), 0.25), some, torch.zeros(8, dtype=torch.long))
    tokens = torch.full((8, 2, 2), 0.5)
    with pytest.raises(
        ValueError, match=r"`calibration` must have shape \(N, classes\), but have 3"
    ):
        conformal_sets(some, tokens, torch.zeros(8, dtype=torch.long))
    with pytest.raises(ValueError, match="same inputs, but got 3 and 2 of them"):
        predictive_distance(torch.zeros(5, 3), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="`reference` must hold at least 2 draws at each input"):
        predictive_distance(torch.randn(5, 3), torch.randn(1, 3))


def test_agreement_and_total_variation_by_loops():
    ours, theirs = (torch.randn(50, 4).softmax(-1) for _ in range(2))
    rows = [*zip(ours.tolist(), theirs.tolist(), strict=True)]
    same = sum(p.index(max(p)) == q.index(max(q)) for p, q in rows) / 50
    assert agreement(ours, theirs) == pytest.approx(same, abs=1e-12)
    # The total variation is the largest difference that any set of classes has.
    largest = [sum(max(a - b, 0) for a, b in zip(p, q, strict=True)) for p, q in rows]
    assert total_variation(ours, theirs) == pytest.approx(sum(largest) / 50, abs=1e-12)


REPEATS, NEW = 500, 40


def assert_covered(found, rank, size):
    """Given the data, the coverage is Beta(k, n + 1 - k): its mean k / (n + 1) within 5 deviations.

    A false alarm has a probability of 6e-7.
    """
    mean = rank / (size + 1)
    of_data = mean * (1 - mean) / (size + 2)
    deviation = math.sqrt((of_data + mean * (1 - mean) / NEW) / REPEATS)
    assert abs(found - mean) < 5 * deviation


@pytest.mark.parametrize(("size", "level", "rank"), [(9, 0.8, 8), (19, 0.5, 10), (30, 0.9, 28)])
def test_intervals_of_a_wrong_model_have_the_coverage_of_the_theorem(size, level, rank):
    """The model has a bias, and a fifth of the standard deviation; each element is a repetition."""
    y, calibration_y = torch.randn(NEW, REPEATS), torch.randn(size, REPEATS)
    parts = [normal_prediction(torch.full(each.shape, 0.7), 0.2) for each in (y, calibration_y)]
    low, high = conformal_interval(*parts, calibration_y, level)
    assert_covered(((low <= y) & (y <= high)).double().mean().item(), rank, size)


@pytest.mark.parametrize(("size", "level", "rank"), [(9, 0.8, 8), (30, 0.9, 28)])
def test_sets_of_a_wrong_model_have_the_coverage_of_the_theorem(size, level, rank):
    """Classes of three are drawn without regard to the probabilities, which have no ties."""
    inside = 0.0
    for _ in range(REPEATS):
        probabilities = torch.randn(NEW + size, 3).softmax(-1)
        y = torch.randint(3, (NEW + size,))
        sets = conformal_sets(probabilities[:NEW], probabilities[NEW:], y[NEW:], level)
        inside += sets[torch.arange(NEW), y[:NEW]].double().mean().item() / REPEATS
    assert_covered(inside, rank, size)


def test_each_element_of_a_target_has_its_own_shift():
    calibration = normal_prediction(torch.zeros(4, 2), 1.0)
    y = torch.tensor([[0.0, 5.0], [0.1, -6.0], [0.2, 7.0], [0.3, 8.0]])
    prediction = normal_prediction(torch.ones(3, 2), 1.0)
    low, high = conformal_interval(prediction, calibration, y, 0.5)
    own_low, own_high = prediction.interval(0.5)
    half = (own_high - own_low)[0, 0] / 2
    shift = torch.stack([0.2 - half, 7.0 - half])  # the third of four, by k = 3
    torch.testing.assert_close(own_low - low, shift.expand(3, 2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(high - own_high, shift.expand(3, 2), rtol=1e-6, atol=1e-6)


def test_few_examples_give_everything():
    parts = [normal_prediction(torch.zeros(n), 1.0) for n in (3, 8)]
    low, high = conformal_interval(*parts, torch.randn(8), 0.9)
    assert torch.equal(high, torch.full((3,), math.inf))
    assert torch.equal(low, -high)
    some = torch.full((8, 2), 0.5)
    assert conformal_sets(some[:3], some, torch.zeros(8, dtype=torch.long), 0.9).all()


def test_the_smallest_level_takes_the_smallest_score():
    calibration = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    new, y = torch.tensor([[0.95, 0.05], [0.7, 0.3]]), torch.tensor([0, 0, 1])
    expected = torch.tensor([[True, False], [False, False]])
    for level in (0.2, 1e-13):
        assert torch.equal(conformal_sets(new, calibration, y, level), expected)
