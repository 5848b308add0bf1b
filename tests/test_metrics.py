"""Scores of class probabilities, and distances between predictive distributions."""

import math

import pytest
import torch

from pyro_structvi.metrics import classification_scores, predictive_distance


def test_accuracy_and_nll():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
    scores = classification_scores(probabilities, torch.tensor([0, 1, 0]))
    assert scores.accuracy == pytest.approx(2 / 3)
    expected = -torch.tensor([0.7, 0.6, 0.3]).log().mean().item()
    assert scores.nll == pytest.approx(expected)


def test_calibration_error_by_its_definition():
    torch.manual_seed(0)
    probabilities = (3 * torch.randn(500, 4)).softmax(-1)
    y = torch.randint(4, (500,))
    confidence, guess = probabilities.max(-1)
    right = (guess == y).double()
    bins = (confidence * 15).ceil().long()
    expected = sum(
        (right[bins == b].sum() - confidence[bins == b].sum()).abs() for b in range(1, 16)
    )
    error = classification_scores(probabilities, y).calibration_error
    assert error == pytest.approx(expected.item() / 500, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_certain_mistake_has_an_infinite_nll_in_every_dtype(dtype):
    probabilities = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    assert classification_scores(probabilities, torch.tensor([1, 1])).nll == torch.inf
    assert classification_scores(probabilities[1:], torch.tensor([1])).nll == pytest.approx(
        math.log(2)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "row", [[2.0, -1.0], [0.6, 0.6], [-0.2, 1.2], [0.3, 0.3], [torch.nan, 1.0], [1.2, 0.0]]
)
def test_what_is_no_vector_of_probabilities_is_refused(row, dtype):
    rows = torch.tensor([[0.5, 0.5], row], dtype=dtype)
    with pytest.raises(ValueError, match=r"must be at least 0 and sum to 1.*row 1.*softmax\(-1\)"):
        classification_scores(rows, torch.tensor([0, 1]))


def test_probabilities_have_two_dimensions():
    for wrong in (torch.ones(2), torch.ones(2, 1).long()):
        with pytest.raises(ValueError, match="`probabilities` must hold real numbers"):
            classification_scores(wrong, torch.zeros(2).long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_softmax_in_any_dtype_is_taken(dtype):
    probabilities = (3 * torch.randn(200, 1000)).softmax(-1).to(dtype)
    classification_scores(probabilities, torch.zeros(200).long())


def test_rounding_beyond_one_changes_nothing():
    probabilities = (3 * torch.randn(50, 4, dtype=torch.float32)).softmax(-1)
    probabilities[0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    y = probabilities.argmax(-1)
    expected = classification_scores(probabilities, y)
    probabilities[0] = torch.tensor([1 + 1.2e-7, -1e-9, 0.0, 0.0])
    assert probabilities.max() > 1
    scores = classification_scores(probabilities, y)
    assert scores.calibration_error == pytest.approx(expected.calibration_error, abs=1e-9)
    assert scores.nll == pytest.approx(expected.nll)


def test_classes_must_fit():
    with pytest.raises(ValueError, match=r"`y` must have shape \(N,\) = \(3,\), but got \(2,\)"):
        classification_scores(torch.ones(3, 2) / 2, torch.zeros(2, dtype=torch.long))


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


def test_inputs_must_be_the_same():
    with pytest.raises(ValueError, match="same inputs, but got 3 and 2 of them"):
        predictive_distance(torch.zeros(5, 3), torch.zeros(5, 2))
