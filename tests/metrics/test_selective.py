"""Risk and coverage, against loops and all orders of ties."""

from itertools import permutations

import pytest
import torch

from pyro_structvi.metrics import risk_coverage


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
