"""How good predictions are, and how far one posterior's predictions are from another's."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from pyro_structvi._checks import check_classes, check_finite, check_real, check_shape, checked


@dataclass(frozen=True)
class ClassificationScores:
    """Scores of predicted class probabilities.

    Attributes:
        accuracy: Share of examples whose most probable class is right.
        nll: Average negative log probability of the right class, in nats; infinite if one of them has
            the probability zero.
        calibration_error: Expected calibration error (15 bins, absolute differences).
    """

    accuracy: float
    nll: float
    calibration_error: float


@checked
def classification_scores(probabilities: Tensor, y: Tensor) -> ClassificationScores:
    """Score predicted class probabilities.

    Args:
        probabilities: Averaged over draws, ``(N, classes)``. Rounding beyond 0 and 1 is cut off.
        y: Right classes ``(N,)``, integers.

    Returns:
        The scores.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> scores = classification_scores(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        >>> scores.accuracy
        0.5

    References:
        Guo et al. (2017), "On calibration of modern neural networks", Eq. 3.
    """
    check_real("probabilities", probabilities, dim=2)
    check_shape("y", y, probabilities.shape[:1], "(N,)", by="probabilities")
    check_classes("y", y, probabilities.shape[-1])
    probabilities = _checked_probabilities(probabilities)
    right = probabilities.gather(1, y.unsqueeze(-1)).squeeze(-1)
    return ClassificationScores(
        accuracy=float((probabilities.argmax(-1) == y).double().mean()),
        nll=float(-right.log().mean()),
        calibration_error=float(
            multiclass_calibration_error(probabilities, y, probabilities.shape[-1], n_bins=15)
        ),
    )


def _checked_probabilities(probabilities: Tensor) -> Tensor:
    """Return probabilities ``(N, classes)`` in double, from 0 to 1, or raise."""
    tolerance = max(1e-3, torch.finfo(probabilities.dtype).eps ** 0.5)
    double = probabilities.double()
    beyond = torch.maximum(-double, double - 1).amax(-1)
    off = torch.maximum(beyond, (double.sum(-1) - 1).abs())
    wrong = ~(off <= tolerance)  # NaN too
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            "`probabilities` must be at least 0 and sum to 1 over the classes, but row "
            f"{index} is not. Pass `logits.softmax(-1)` for logits."
        )
    return double.clamp(0, 1)


@dataclass(frozen=True)
class PredictiveDistance:
    """How far the predictions of one posterior are from a reference, averaged over inputs.

    Attributes:
        mean_difference: Average absolute difference of predictive means, in the targets' units.
        scale_ratio: Geometric mean of the ratio of predictive standard deviations; below 1 the
            posterior is too sure.
        wasserstein: Average 1-Wasserstein distance of the predictive distributions, in the targets'
            units.
    """

    mean_difference: float
    scale_ratio: float
    wasserstein: float


@checked
def predictive_distance(functions: Tensor, reference: Tensor) -> PredictiveDistance:
    """Compare draws of two predictive distributions, input by input.

    Args:
        functions: Draws ``(S, N)`` or ``(S, N, 1)`` of the function at N inputs.
        reference: Draws of the reference at the same inputs; the number of draws may differ.

    Returns:
        The distances.

    Raises:
        ValueError: If the numbers of inputs differ.

    Example:
        >>> draws = torch.randn(500, 3)
        >>> round(predictive_distance(draws + 1.0, draws).mean_difference, 3)
        1.0

    References:
        Villani (2009), "Optimal transport", for the Wasserstein distance.
    """
    check_real("functions", functions, dim=2)
    check_real("reference", reference, dim=2)
    check_finite("functions", functions)
    check_finite("reference", reference)
    ours, theirs = functions.flatten(1).double(), reference.flatten(1).double()
    if ours.shape[1] != theirs.shape[1]:
        raise ValueError(
            f"`functions` and `reference` must be draws at the same inputs, but got "
            f"{ours.shape[1]} and {theirs.shape[1]} of them."
        )
    distances = [
        wasserstein_distance(a, b)
        for a, b in zip(ours.T.cpu().numpy(), theirs.T.cpu().numpy(), strict=True)
    ]
    return PredictiveDistance(
        mean_difference=float((ours.mean(0) - theirs.mean(0)).abs().mean()),
        scale_ratio=float((ours.std(0) / theirs.std(0)).log().mean().exp()),
        wasserstein=float(np.mean(distances)),
    )
