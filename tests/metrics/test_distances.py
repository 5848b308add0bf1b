"""Distances between the predictions of two posteriors, against scipy and loops."""

import pytest
import torch
from scipy.stats import wasserstein_distance

from pyro_structvi.metrics import agreement, predictive_distance, total_variation, wasserstein


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


def test_other_draws_are_refused():
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
