"""Scores of the probabilities of labels that are independent of each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_structvi._checks import Count, brief, check_shape, checked
from pyro_structvi.metrics.classification import binned_error
from pyro_structvi.metrics.inputs import checked_shares


@dataclass(frozen=True)
class BinaryScores:
    """Scores of the probabilities of independent labels.

    Attributes:
        accuracy: Share of labels that are right, at the threshold 1/2.
        nll: Negative log probability of an example's labels, summed over them and averaged over
            examples, in nats; infinite if one of them has the probability zero.
        calibration_error: Expected difference of a label's probability from its frequency, over all
            labels together, in bins of equal width.
        brier: Average squared difference of a label from its probability, from 0 to 1: half of what
            ``brier_score`` has for the two classes of a label.
    """

    accuracy: float
    nll: float
    calibration_error: float
    brier: float


@checked
def binary_scores(probabilities: Tensor, y: Tensor, num_bins: Count = 15) -> BinaryScores:
    r"""Score the probabilities of one label for each example, or of several independent ones.

    .. math:: \mathrm{nll} = -\frac{1}{N} \sum_{n, l} y_{nl} \log p_{nl} + (1 - y_{nl}) \log (1 - p_{nl})

    Args:
        probabilities: That a label is 1, ``(N,)`` or ``(N, labels)``. Rounding beyond 0 and 1 is cut
            off.
        y: Labels of the same shape, 0 or 1, of any real dtype.
        num_bins: Number of bins of the calibration error.

    Returns:
        The scores.

    Raises:
        ValueError: If shapes do not fit, a probability is below 0 or above 1, or a label is neither
            0 nor 1.

    Example:
        >>> scores = binary_scores(torch.tensor([0.75, 0.5]), torch.tensor([1, 0]))
        >>> scores.accuracy, scores.brier
        (1.0, 0.15625)

    References:
        Brier (1950), "Verification of forecasts expressed in terms of probability"; Guo et al.
        (2017), "On calibration of modern neural networks", Eq. 3.
    """
    probabilities = checked_shares("probabilities", probabilities)
    check_shape("y", y, probabilities.shape, "that of `probabilities`", by="probabilities")
    if y.is_complex() or y.is_meta or not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"`y` must hold labels 0 and 1, but got {brief(y)} that does not.")
    y = y.double().to(probabilities.device)
    right = torch.where(y == 1, probabilities, 1 - probabilities)
    return BinaryScores(
        accuracy=float(((probabilities > 0.5) == (y == 1)).double().mean()),
        nll=float(-right.log().sum() / len(right)),
        calibration_error=binned_error(probabilities.flatten(), y.flatten(), num_bins),
        brier=float((probabilities - y).square().mean()),
    )
