"""Detection of examples from elsewhere, against pairs, loops and closed forms."""

import pytest
import torch

from pyro_structvi.metrics import detection_scores


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


def test_perfect_and_useless_scores():
    low, high = torch.rand(40), 2 + torch.rand(20)
    perfect = detection_scores(low, high)
    assert (perfect.auroc, perfect.fpr_at_95) == (1, 0)
    assert (perfect.aupr, perfect.aupr_inside) == (pytest.approx(1), pytest.approx(1))
    constant = detection_scores(torch.zeros(40), torch.zeros(20))
    assert (constant.auroc, constant.aupr, constant.fpr_at_95) == (0.5, pytest.approx(1 / 3), 1)
    assert constant.aupr_inside == pytest.approx(2 / 3)
