"""Coverage of predictive intervals, of predictions whose intervals are known."""

import math

import pytest
import torch
from scipy.stats import binom, norm

from pyro_structvi.diagnostics import expected_coverage
from tests.predictions import normal_prediction


def test_counts_with_bounds_included_and_the_error_is_that_of_the_examples():
    prediction = normal_prediction(torch.tensor([0.0, 1.0, 2.0, 3.0]), 1.0)
    half = norm.ppf(0.75)
    y = torch.tensor([0.0 + half, 1.0 + 1.01 * half, 2.0, 30.0])
    found = expected_coverage(prediction, y, levels=[0.5])[0.5]
    assert (found.observed, found.standard_error) == (0.5, pytest.approx(math.sqrt(0.25 / 4)))
    y = torch.tensor([[0.0, 9.0], [0.0, 0.0], [9.0, 9.0]])  # several targets count each
    found = expected_coverage(normal_prediction(torch.zeros(3, 2), 1.0), y, [0.8])[0.8]
    assert (found.observed, found.standard_error) == (0.5, pytest.approx(math.sqrt(0.16 / 3)))


def test_the_right_intervals_are_covered_at_every_level():
    """The count is binomial; P = 1e-6 for each of four levels."""
    mean, size = torch.randn(2000), 2000
    found = expected_coverage(normal_prediction(mean, 0.7), mean + 0.7 * torch.randn(size))
    assert [*found] == [0.5, 0.8, 0.9, 0.95]
    for level, coverage in found.items():
        low, high = binom.ppf([5e-7, 1 - 5e-7], size, level) / size
        assert low <= coverage.observed <= high
        assert coverage.standard_error == pytest.approx(binom.std(size, level) / size)


REFUSED = (
    ({"y": torch.zeros(4)}, ValueError, r"`y` must have shape .* = \(3,\), but got \(4,\)"),
    ({"y": torch.tensor([0.0, torch.nan, 1.0])}, ValueError, "`y` must be finite everywhere"),
    ({"levels": []}, ValueError, "`levels` must hold at least one level"),
)


def test_other_arguments_are_refused():
    valid = {"prediction": normal_prediction(torch.zeros(3), 1.0), "y": torch.zeros(3)}
    for arguments, error, message in REFUSED:
        with pytest.raises(error, match=message):
            expected_coverage(**valid | arguments)
