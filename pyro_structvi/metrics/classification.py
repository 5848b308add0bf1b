"""Scores of class probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_structvi._checks import Count, brief, check_shape, checked
from pyro_structvi.metrics.inputs import checked_classes, checked_probabilities, checked_shares


def in_order_of(keys: Tensor, values: Tensor) -> Tensor:
    """Return values sorted by ascending keys, each replaced by the mean of its ties.

    That is the expectation over all orders of examples with equal keys. A sum of the first values is
    then a function of the pairs of keys and values, and not of the order in which they were given.

    Args:
        keys: ``(N,)``.
        values: ``(N,)``, in double.

    Returns:
        The values ``(N,)``.
    """
    _, group, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, group, values)
    averages: Tensor = sums / counts
    return averages.repeat_interleave(counts)


@dataclass(frozen=True)
class ClassificationScores:
    """Scores of predicted class probabilities.

    Attributes:
        accuracy: Share of examples whose most probable class is right.
        nll: Average negative log probability of the right class, in nats; infinite if one of them has
            the probability zero.
        calibration_error: Expected calibration error (equal-width bins, absolute differences).
        brier: Average squared distance, summed over classes, of the probabilities from the right
            class; from 0 to 2.
        recall: Of the examples of each class, the share that is recognized; NaN where there are none.
        balanced_accuracy: Average recall of the classes that have examples.
    """

    accuracy: float
    nll: float
    calibration_error: float
    brier: float
    recall: tuple[float, ...]
    balanced_accuracy: float


@checked
def classification_scores(
    probabilities: Tensor, y: Tensor, num_bins: Count = 15
) -> ClassificationScores:
    """Score predicted class probabilities.

    Args:
        probabilities: Averaged over draws, ``(N, classes)``. Rounding beyond 0 and 1 is cut off.
        y: Right classes ``(N,)``, integers.
        num_bins: Number of bins of the calibration error.

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
    rounded, classes = _checked(probabilities, y)
    hits = _top_class(rounded, classes)[1]
    recall = [float(hits[classes == each].mean()) for each in range(rounded.shape[-1])]
    return ClassificationScores(
        accuracy=accuracy(probabilities, y),
        nll=nll(probabilities, y),
        calibration_error=expected_calibration_error(probabilities, y, num_bins),
        brier=brier_score(probabilities, y),
        recall=tuple(recall),
        balanced_accuracy=float(torch.tensor(recall, dtype=torch.float64).nanmean()),
    )


@checked
def accuracy(probabilities: Tensor, y: Tensor) -> float:
    """Return the share of examples whose most probable class is right.

    Args:
        probabilities: ``(N, classes)``; among equally probable classes the first one counts.
        y: Right classes ``(N,)``, integers.

    Returns:
        The share, from 0 to 1.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        0.5
    """
    _, right = _top_class(*_checked(probabilities, y))
    return float(right.mean())


@checked
def nll(probabilities: Tensor, y: Tensor) -> float:
    r"""Return the average negative log probability of the right class.

    .. math:: -\frac{1}{N} \sum_n \log p_n(y_n)

    Args:
        probabilities: ``(N, classes)``.
        y: Right classes ``(N,)``, integers.

    Returns:
        The average in nats; infinite if a right class has the probability zero.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), 4)
        0.6931
    """
    probabilities, y = _checked(probabilities, y)
    return float(-probabilities.gather(1, y.unsqueeze(-1)).log().mean())


@checked
def brier_score(probabilities: Tensor, y: Tensor) -> float:
    r"""Return the average squared distance of probabilities from the right class.

    .. math:: \frac{1}{N} \sum_n \sum_c \left( p_n(c) - 1[c = y_n] \right)^2

    Args:
        probabilities: ``(N, classes)``.
        y: Right classes ``(N,)``, integers.

    Returns:
        The score, from 0 to 2; the lower the better.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> brier_score(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([0, 0]))
        1.25

    References:
        Brier (1950), "Verification of forecasts expressed in terms of probability".
    """
    probabilities, y = _checked(probabilities, y)
    right = one_hot(y, probabilities.shape[-1])
    return float((probabilities - right).square().sum(-1).mean())


@checked
def expected_calibration_error(probabilities: Tensor, y: Tensor, num_bins: Count = 15) -> float:
    r"""Return how far confidence is from accuracy, in bins of equal width.

    The confidence is the probability of the most probable class. With the N examples in bins B of
    confidences,

    .. math:: \sum_B \frac{|B|}{N} \left| \mathrm{accuracy}(B) - \mathrm{confidence}(B) \right|.

    Args:
        probabilities: ``(N, classes)``.
        y: Right classes ``(N,)``, integers.
        num_bins: Number of bins from 0 to 1. A bin has its lower end; the last one has both ends.

    Returns:
        The error, from 0 to 1.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> probabilities = torch.tensor([[0.75, 0.25]]).repeat(4, 1)
        >>> expected_calibration_error(probabilities, torch.tensor([0, 0, 0, 1]))
        0.0

    References:
        Guo et al. (2017), "On calibration of modern neural networks", Eq. 3.
    """
    return binned_error(*_top_class(*_checked(probabilities, y)), num_bins)


@checked
def adaptive_calibration_error(probabilities: Tensor, y: Tensor, num_bins: Count = 15) -> float:
    """Return how far confidence is from accuracy, in bins of equally many examples.

    The formula is that of :func:`expected_calibration_error`, for the most probable class; its
    bins hold the examples in the order of their confidences, and their sizes differ by one at most. So
    confidences that crowd near 1 are told apart. Examples of equal confidence count with their average
    accuracy, so that the order of the examples does not matter.

    Args:
        probabilities: ``(N, classes)``.
        y: Right classes ``(N,)``, integers.
        num_bins: Number of bins; one for each example if there are fewer.

    Returns:
        The error, from 0 to 1.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> probabilities = torch.tensor([[0.75, 0.25]]).repeat(4, 1)
        >>> adaptive_calibration_error(probabilities, torch.tensor([0, 0, 0, 1]), num_bins=2)
        0.0

    References:
        Nguyen and O'Connor (2015), "Posterior calibration and exploratory analysis for natural
        language processing models", for bins of equal size (with squared differences). Nixon et al.
        (2019), "Measuring calibration in deep learning", have absolute differences, and average over
        all classes where this takes the most probable one.
    """
    confidence, right = _top_class(*_checked(probabilities, y))
    gaps = in_order_of(confidence, right - confidence)
    count = len(gaps)
    bins = min(num_bins, count)
    place = torch.arange(count, device=gaps.device) * bins // count
    return float(gaps.new_zeros(bins).index_add(0, place, gaps).abs().sum() / count)


@checked
def classwise_calibration_error(probabilities: Tensor, y: Tensor, num_bins: Count = 15) -> float:
    """Return how far the probability of a class is from its frequency, averaged over classes.

    For each class the examples are in bins of equal width by the probability of that class, and the
    average probability of a bin is compared with the share of examples that are of the class, with
    the formula of :func:`expected_calibration_error`. So the probabilities of all classes are looked
    at, and not those of the most probable ones alone.

    Args:
        probabilities: ``(N, classes)``.
        y: Right classes ``(N,)``, integers.
        num_bins: Number of bins from 0 to 1 for each class.

    Returns:
        The error, from 0 to 1.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> probabilities = torch.tensor([[0.75, 0.25]]).repeat(4, 1)
        >>> classwise_calibration_error(probabilities, torch.tensor([0, 0, 0, 1]))
        0.0

    References:
        Kull et al. (2019), "Beyond temperature scaling", the classwise expected calibration error;
        Nixon et al. (2019), "Measuring calibration in deep learning", call it static.
    """
    probabilities, y = _checked(probabilities, y)
    columns = enumerate(probabilities.unbind(-1))
    errors = [binned_error(own, (y == label).double(), num_bins) for label, own in columns]
    return sum(errors) / len(errors)


def binned_error(confidence: Tensor, right: Tensor, num_bins: int) -> float:
    """Return the calibration error of confidences with outcomes 0 and 1, in bins of equal width."""
    inner_edges = torch.arange(1, num_bins, device=confidence.device).to(confidence) / num_bins
    # A number on an edge is in the bin above it, and 1 in the last one.
    place = torch.bucketize(confidence.contiguous(), inner_edges, right=True)
    gaps = right - confidence
    return float(gaps.new_zeros(num_bins).index_add(0, place, gaps).abs().sum() / len(gaps))


def _checked(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = checked_probabilities("probabilities", probabilities)
    if probabilities.dim() != 2:
        raise ValueError(
            f"`probabilities` must have shape (N, classes), but have {probabilities.dim()} dimensions. "
            "Average over draws, and let `y` have one class for each row."
        )
    return probabilities, checked_classes("y", y, probabilities)


def _top_class(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of the most probable class, and 1 where it is right, else 0."""
    guess = probabilities.argmax(-1, keepdim=True)
    return probabilities.gather(1, guess).squeeze(-1), (guess.squeeze(-1) == y).double()


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
