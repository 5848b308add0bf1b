"""Scores of independent labels, against scikit-learn and those of two classes."""

import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from pyro_structvi.metrics import (
    binary_scores,
    brier_score,
    classwise_calibration_error,
)


def predicted(*shape):
    probabilities = (2 * torch.randn(shape)).sigmoid()
    return probabilities, torch.randint(2, shape)


def test_one_label_as_scikit_learn_has_it():
    probabilities, y = predicted(300)
    scores = binary_scores(probabilities, y)
    assert scores.accuracy == accuracy_score(y, probabilities > 0.5)
    assert scores.nll == pytest.approx(log_loss(y, probabilities), abs=1e-12)
    assert scores.brier == pytest.approx(brier_score_loss(y, probabilities), abs=1e-12)


def test_one_label_is_one_of_two_classes():
    probabilities, y = predicted(300)
    classes = torch.stack([1 - probabilities, probabilities], -1)
    scores = binary_scores(probabilities, y, num_bins=1)
    assert scores.brier == pytest.approx(brier_score(classes, y) / 2, abs=1e-12)
    error = classwise_calibration_error(classes, y, num_bins=1)
    assert scores.calibration_error == pytest.approx(error, abs=1e-12)


def test_several_labels():
    probabilities, y = predicted(200, 3)
    columns = [binary_scores(probabilities[:, label], y[:, label]) for label in range(3)]
    scores = binary_scores(probabilities, y)
    assert scores.accuracy == pytest.approx(sum(own.accuracy for own in columns) / 3, abs=1e-12)
    assert scores.nll == pytest.approx(sum(own.nll for own in columns), abs=1e-12)
    assert scores.brier == pytest.approx(sum(own.brier for own in columns) / 3, abs=1e-12)


@pytest.mark.parametrize("num_bins", [10, 15])
def test_calibration_error_by_its_definition(num_bins):
    probabilities, y = predicted(200, 3)
    place, expected = (probabilities * num_bins).floor(), 0.0
    for index in range(num_bins):
        inside = place == index
        expected += float((y[inside].double() - probabilities[inside]).sum().abs()) / 600
    error = binary_scores(probabilities, y, num_bins).calibration_error
    assert error == pytest.approx(expected, abs=1e-12)


def test_a_label_is_predicted_above_one_half():
    assert binary_scores(torch.tensor([0.51, 0.49, 0.5]), torch.tensor([1, 0, 0])).accuracy == 1
    assert binary_scores(torch.tensor([0.51, 0.49, 0.5]), torch.tensor([0, 1, 1])).accuracy == 0


def test_certainty():
    certain = torch.tensor([1.0, 0.0])
    assert binary_scores(certain, torch.tensor([1, 0])).nll == 0
    assert binary_scores(certain, torch.tensor([1, 1])).nll == torch.inf


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.float64])
def test_labels_of_any_dtype(dtype):
    probabilities, y = predicted(50)
    assert binary_scores(probabilities, y.to(dtype)) == binary_scores(probabilities, y)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"`probabilities` must be from 0 to 1.*sigmoid\(\)"):
        binary_scores(torch.tensor([0.5, 1.2]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="`y` must hold labels 0 and 1"):
        binary_scores(torch.tensor([0.5, 0.2]), torch.tensor([0.0, 0.5]))
    with pytest.raises(ValueError, match=r"`y` must have shape that of `probabilities` = \(2,\)"):
        binary_scores(torch.tensor([0.5, 0.2]), torch.tensor([0]))
