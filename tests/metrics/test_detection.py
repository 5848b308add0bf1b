"""Detection of examples from elsewhere, against pairs, loops and closed forms."""

import math

import pytest
import torch
from scipy.stats import entropy

import pyro_structvi as ps
from pyro_structvi.metrics import (
    detect,
    detection_scores,
    entropy_score,
    max_probability_score,
    mutual_information_score,
    ood_scores,
)
from tests.predictions import normal_prediction


def average_precision(found, others):
    """Return the sum over thresholds of precision times the gain of recall, from the highest on."""
    before, total = 0.0, 0.0
    for threshold in sorted({*found, *others}, reverse=True):
        hits = sum(value >= threshold for value in found)
        alarms = sum(value >= threshold for value in others)
        recall = hits / len(found)
        total += (recall - before) * hits / (hits + alarms)
        before = recall
    return total


@pytest.mark.parametrize("digits", [1, 8])
def test_scores_by_their_definitions(digits):
    inside, outside = torch.randn(70).round(decimals=digits), torch.randn(53).round(decimals=digits)
    outside = outside + 1
    scores = detection_scores(inside, outside)
    pairs = outside.unsqueeze(-1) - inside
    auroc = (pairs > 0).double().mean() + (pairs == 0).double().mean() / 2
    assert scores.auroc == pytest.approx(auroc.item(), abs=1e-12)
    near, far = inside.tolist(), outside.tolist()
    assert scores.aupr == pytest.approx(average_precision(far, near), abs=1e-12)
    flipped = average_precision([-value for value in near], [-value for value in far])
    assert scores.aupr_inside == pytest.approx(flipped, abs=1e-12)
    thresholds = [t for t in [*near, *far] if sum(value >= t for value in far) >= 0.95 * len(far)]
    alarms = min(sum(value >= t for value in near) / len(near) for t in thresholds)
    assert scores.fpr_at_95 == pytest.approx(alarms, abs=1e-12)


def test_perfect_and_useless_scores():
    low, high = torch.rand(40), 2 + torch.rand(20)
    perfect = detection_scores(low, high)
    assert (perfect.auroc, perfect.fpr_at_95) == (1, 0)
    assert (perfect.aupr, perfect.aupr_inside) == (pytest.approx(1), pytest.approx(1))
    constant = detection_scores(torch.zeros(40), torch.zeros(20))
    assert (constant.auroc, constant.aupr, constant.fpr_at_95) == (0.5, pytest.approx(1 / 3), 1)
    assert constant.aupr_inside == pytest.approx(2 / 3)


def test_the_threshold_may_lie_between_points_in_line():
    scores = detection_scores(torch.arange(100.0), torch.arange(100.0))
    assert scores.fpr_at_95 == pytest.approx(0.95, abs=1e-12)


def test_negated_and_swapped_the_other_rate():
    inside, outside = torch.randn(100), 1 + torch.randn(100)
    scores = detection_scores(-outside, -inside)
    threshold = inside.sort().values[94]  # 95 of 100 inside are at most this
    assert scores.fpr_at_95 == pytest.approx((outside <= threshold).double().mean().item())
    assert scores.auroc == pytest.approx(detection_scores(inside, outside).auroc, abs=1e-12)


def test_scores_of_probabilities():
    probabilities = torch.randn(9, 4).softmax(-1)
    largest = 1 - probabilities.max(-1).values
    torch.testing.assert_close(max_probability_score(probabilities), largest, rtol=0, atol=1e-12)
    expected = torch.tensor(entropy(probabilities.numpy(), axis=-1))
    torch.testing.assert_close(entropy_score(probabilities), expected, rtol=0, atol=1e-12)
    assert entropy_score(torch.tensor([[1.0, 0.0]])).item() == 0


def test_mutual_information_is_the_average_divergence_from_the_mean():
    draws = (2 * torch.randn(30, 9, 4)).softmax(-1)
    mean = draws.mean(0).numpy()
    divergences = [torch.tensor(entropy(own.numpy(), mean, axis=-1)) for own in draws]
    expected = torch.stack(divergences).mean(0)
    found = mutual_information_score(draws)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    same = draws[:1].expand(5, -1, -1)
    assert mutual_information_score(same).max() < 1e-12
    sure = torch.eye(2).unsqueeze(1)
    assert mutual_information_score(sure).item() == pytest.approx(math.log(2), abs=1e-12)


def predictions():
    model = ps.Classifier(ps.bayesianize(torch.nn.Linear(4, 3)), num_data=10)
    guide = ps.MeanFieldGuide(model, init_scale=1.0)
    return [
        ps.predict(model, guide, size * torch.randn(20, 4), num_samples=30) for size in (0.1, 3.0)
    ]


def test_of_predictions():
    near, far = predictions()
    scores = ood_scores(near)
    draws = near.functions.softmax(-1)
    for name, expected in {
        "max_probability": max_probability_score(near.mean),
        "entropy": entropy_score(near.mean),
        "mutual_information": mutual_information_score(draws),
    }.items():
        torch.testing.assert_close(scores[name], expected, rtol=0, atol=1e-9)
    found, others = detect(near, far), ood_scores(far)
    assert found == {name: detection_scores(scores[name], others[name]) for name in scores}
    assert found["mutual_information"].auroc > 0.8


def test_what_a_prediction_must_have():
    near, _ = predictions()
    regression = normal_prediction(torch.zeros(3, 1), 1.0)
    with pytest.raises(ValueError, match="`prediction_outside` must be of class probabilities"):
        detect(near, regression)
    with pytest.raises(TypeError, match="`prediction_inside` must be a Prediction"):
        detect(near.mean, near)
    with pytest.raises(
        TypeError, match=r"`prediction` must be a Prediction, .* class Prediction\."
    ):
        ood_scores(ps.posterior.Prediction)


def test_one_number_for_each_example():
    with pytest.raises(ValueError, match="`outside` must have one number for each example"):
        detection_scores(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="`inside` must hold at least one value"):
        detection_scores(torch.zeros(0), torch.zeros(3))
