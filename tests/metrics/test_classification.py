"""Scores of class probabilities, detection and selection, against definitions and scikit-learn."""

import math
from itertools import permutations

import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, recall_score

from pyro_structvi.metrics import classification_scores, detection_scores, risk_coverage


def predicted(count=500, classes=4):
    probabilities = (3 * torch.randn(count, classes)).softmax(-1)
    return probabilities, probabilities.multinomial(1).squeeze(-1)  # so that bins have both signs


def error_by_definition(confidence, right, num_bins):
    """Guo et al. (2017), Eq. 3, one bin after the other, each with its upper end."""
    error = 0.0
    for index in range(num_bins):
        low, high = index / num_bins, (index + 1) / num_bins
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = right[inside].mean() - confidence[inside].mean()
            error += float(inside.double().mean() * gap.abs())
    return error


def top(probabilities, y):
    confidence, guess = probabilities.max(-1)
    return confidence, (guess == y).double()


def test_scores_are_those_of_scikit_learn():
    probabilities, y = predicted()
    scores = classification_scores(probabilities, y)
    guess = probabilities.argmax(-1)
    assert scores.accuracy == pytest.approx(accuracy_score(y, guess))
    assert scores.nll == pytest.approx(log_loss(y, probabilities), abs=1e-12)
    expected = brier_score_loss(y, probabilities.numpy(), scale_by_half=False, labels=range(4))
    assert scores.brier == pytest.approx(expected, abs=1e-12)
    assert classification_scores(probabilities.requires_grad_(), y.int()) == scores
    for dtype in (torch.uint8, torch.int16, torch.uint16):
        assert classification_scores(probabilities, y.to(dtype)) == scores
    y[y == 2] = 1
    scores = classification_scores(probabilities, y)
    expected = recall_score(y, guess, labels=range(4), average=None, zero_division=math.nan)
    assert scores.recall == pytest.approx(tuple(expected), nan_ok=True)
    assert math.isnan(scores.recall[2])
    assert scores.balanced_accuracy == pytest.approx(expected[[0, 1, 3]].mean())


def test_one_class_is_always_right():
    scores = classification_scores(torch.ones(3, 1), torch.zeros(3).long())
    assert (scores.accuracy, scores.nll, scores.brier, scores.calibration_error) == (1, 0, 0, 0)
    assert (scores.recall, scores.balanced_accuracy) == ((1,), 1)


@pytest.mark.parametrize("num_bins", [1, 15])
def test_calibration_error_by_its_definition(num_bins):
    probabilities, y = predicted()
    expected = error_by_definition(*top(probabilities, y), num_bins)
    scores = classification_scores(probabilities, y, num_bins)
    assert scores.calibration_error == pytest.approx(expected, abs=1e-12)
    assert (scores == classification_scores(probabilities, y)) == (num_bins == 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_end_of_bins_belongs_to_the_bin_below(dtype):
    """One bin: accuracy 1/2, confidence 0.975, 0.575, ...; two: (0.5 + 0.4) / 2, (0.6 + 0.3) / 2."""
    for confidences, bins, error in (
        ([1.0, 0.95], 10, 0.475),
        ([0.5, 0.6], 2, 0.45),
        ([0.6, 0.55], 15, 0.075),
        ([0.6, 0.7], 10, 0.45),
        ([0.6, 0.595], 50, 0.0975),
        ([0.6, 0.5995], 1000, 0.09975),
    ):
        p = torch.tensor(confidences, dtype=dtype)
        scores = classification_scores(torch.stack([p, 1 - p], -1), torch.tensor([1, 0]), bins)
        assert scores.calibration_error == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_probabilities_in_any_dtype(dtype):
    probabilities = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    assert classification_scores(probabilities, torch.tensor([1, 1])).nll == torch.inf
    probabilities = (3 * torch.randn(200, 1000)).softmax(-1).to(dtype)
    scores = classification_scores(probabilities, torch.zeros(200).long())
    assert scores.accuracy == pytest.approx((probabilities.argmax(-1) == 0).double().mean().item())
    assert scores.nll == pytest.approx(-probabilities[:, 0].double().log().mean().item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_rows_are_refused(dtype):
    message = r"must be at least 0 and sum to 1.*row 1.*softmax\(-1\)"
    for row in ([0.6, 0.6], [-0.2, 1.2], [0.3, 0.3], [torch.nan, 1.0], [1.2, 0.0]):
        rows = torch.tensor([[0.5, 0.5], row], dtype=dtype)
        with pytest.raises(ValueError, match=message):
            classification_scores(rows, torch.tensor([0, 1]))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"must have shape \(N, classes\), but have 3 dimensions"):
        classification_scores(torch.ones(5, 2, 1), torch.zeros(5).long())
    with pytest.raises(ValueError, match=r"`y` must have shape \(N,\) = \(3,\), but got \(2,\)"):
        classification_scores(torch.ones(3, 2) / 2, torch.zeros(2, dtype=torch.long))


def test_rounding_beyond_one_changes_nothing():
    probabilities = (3 * torch.randn(50, 4, dtype=torch.float32)).softmax(-1)
    probabilities[0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    y = probabilities.argmax(-1)
    expected = classification_scores(probabilities, y)
    probabilities[0] = torch.tensor([1 + 1.2e-7, -1e-9, 0.0, 0.0])
    assert probabilities.max() > 1
    scores = classification_scores(probabilities, y)
    assert scores.calibration_error == pytest.approx(expected.calibration_error, abs=1e-6)
    assert scores.nll == pytest.approx(expected.nll)
    assert classification_scores(probabilities[:1], torch.tensor([1])).nll == torch.inf
    assert classification_scores(probabilities[:1], torch.tensor([0])).brier == 0


# ---- detection -----------------------------------------------------------------------------------


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
    assert scores.auroc == pytest.approx(auroc.item(), abs=1e-6)
    near, far = inside.tolist(), outside.tolist()
    assert scores.aupr == pytest.approx(average_precision(far, near), abs=1e-6)
    flipped = average_precision([-value for value in near], [-value for value in far])
    assert scores.aupr_inside == pytest.approx(flipped, abs=1e-6)
    thresholds = [t for t in [*near, *far] if sum(value >= t for value in far) >= 0.95 * len(far)]
    alarms = min(sum(value >= t for value in near) / len(near) for t in thresholds)
    assert scores.fpr_at_95 == pytest.approx(alarms, abs=1e-6)


# ---- selection -----------------------------------------------------------------------------------


def curve_in_order(losses):
    """Return risks one after the other, and their average."""
    risks = [sum(losses[:count]) / count for count in range(1, len(losses) + 1)]
    return risks, sum(risks) / len(risks)


def test_the_curve_by_its_definition():
    uncertainty, loss = torch.randn(60), torch.rand(60)
    found = risk_coverage(uncertainty, loss)
    order = sorted(range(60), key=lambda index: uncertainty[index].item())
    risks, area = curve_in_order([loss[index].item() for index in order])
    torch.testing.assert_close(found.risk, torch.tensor(risks), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.coverage, torch.arange(1, 61) / 60)
    assert found.area == pytest.approx(area, abs=1e-12)
    _, best = curve_in_order(sorted(loss.tolist()))
    assert found.excess_area == pytest.approx(area - best, abs=1e-12)


def test_ties_count_with_the_average_over_their_orders():
    uncertainty = torch.tensor([0.5, 0.1, 0.5, 0.5, 0.9])
    loss = torch.tensor([1.0, 0.0, 0.2, 0.0, 0.7])
    orders = [[0.0, *middle, 0.7] for middle in permutations([1.0, 0.2, 0.0])]
    area = sum(curve_in_order(order)[1] for order in orders) / len(orders)
    for order in (torch.arange(5), torch.tensor([4, 3, 2, 1, 0]), torch.randperm(5)):
        found = risk_coverage(uncertainty[order], loss[order])
        assert found.area == pytest.approx(area, abs=1e-12)
