"""Scores of predictions and uncertainties."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot

from pyro_structvi._checks import Count, checked
from pyro_structvi.metrics.inputs import (
    check_numbers,
    check_vector,
    checked_classes,
    checked_probabilities,
    same_shape_doubles,
)
from pyro_structvi.posterior.prediction import (
    Level,
    Prediction,
    observed_densities,
    observed_targets,
)

OBSERVATIONS = 100  # for the CRPS, at least, and two of each draw


@dataclass(frozen=True)
class RegressionScores:
    """Scores of a prediction of numbers, in the targets' units.

    Attributes:
        rmse: Root mean squared error of the predictive mean.
        log_density: Average log predictive density, in nats; minus infinity if one is zero.
        crps: Average continuous ranked probability score.
        coverage: Share of targets in their predictive intervals, ideally the level.
        width: Average width of the intervals.
    """

    rmse: float
    log_density: float
    crps: float
    coverage: float
    width: float


@checked
def regression_scores(prediction: Prediction, y: Tensor, level: Level = 0.95) -> RegressionScores:
    """Score a prediction of numbers.

    The continuous ranked probability score is an unbiased estimate of the mixture's, from two random
    observations of each draw, and at least 100 in all. Elements of targets that the model masks do not
    count.

    Args:
        prediction: A prediction with ``predict(..., y=y)``, not streamed.
        y: The same targets, in the shape of ``prediction.mean``.
        level: Probability of the intervals, strictly between 0 and 1.

    Raises:
        ValueError: If shapes differ, a target is not finite or has no log density, or all are masked.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
        >>> x, y = torch.zeros(4, 1), torch.tensor([[-0.5], [0.5], [0.0], [9.0]])
        >>> net = bayesianize(torch.nn.Linear(1, 1, bias=False), prior=1.0)
        >>> model = Regressor(net, num_data=4, noise_scale=1.0)  # predicts N(0, 1) at zero
        >>> scores = regression_scores(predict(model, MeanFieldGuide(model), x, y=y), y)
        >>> scores.coverage, round(scores.width, 2)
        (0.75, 3.92)

    References:
        Gneiting and Raftery (2007), "Strictly proper scoring rules, prediction, and estimation",
        Eq. 21.
    """
    if prediction.log_density is None:
        raise ValueError(
            "`prediction` must have a log density of the targets, but got None. Call "
            "`predict(model, posterior, x, y=y)`."
        )
    if not bool((prediction.log_density < torch.inf).all()):  # NaN too
        raise ValueError("`prediction.log_density` must be finite or minus infinity, but is not.")
    mean, y = same_shape_doubles(**{"prediction.mean": prediction.mean, "y": y})
    seen = observed_targets(prediction, y)
    lower, upper = (end.double() for end in prediction.interval(level))
    squared_error = _library("torchmetrics.functional").mean_squared_error
    return RegressionScores(
        rmse=float(squared_error(mean[seen], y[seen], squared=False)),
        log_density=float(observed_densities(prediction).double().mean()),
        crps=float(_crps(prediction, y)[seen].mean()),
        coverage=float(((lower <= y) & (y <= upper))[seen].double().mean()),
        width=float((upper - lower)[seen].mean()),
    )


def _crps(prediction: Prediction, y: Tensor) -> Tensor:
    """Return an unbiased estimate of the score of the mixture, ``(N, *event)``."""
    draws = prediction.likelihood.batch_shape[0]
    each = max(2, -(-OBSERVATIONS // draws))
    observations = prediction.sample_observations(each).double()
    crps = _library("scoringrules").crps_ensemble
    # The quantile decomposition takes S log S operations. It pairs each observation with itself, in
    # place of another one of the same draw: a fair estimate would take members of an ensemble for
    # random draws, and score unlike members too well.
    found: Tensor = crps(y, observations, m_axis=0, estimator="qd", backend="torch")
    within: Tensor = observations.unflatten(0, (each, draws)).diff(dim=0).abs().mean((0, 1))
    return found - within / (2 * len(observations))


@dataclass(frozen=True)
class ClassificationScores:
    """Scores of predicted class probabilities.

    Attributes:
        accuracy: Share of examples whose most probable class is right.
        nll: Average negative log probability of the right class, in nats; infinite if one is zero.
        calibration_error: Expected calibration error in bins of equal width, each with its upper end.
        brier: Average squared distance from the right class, summed over classes; from 0 to 2.
        recall: Accuracy within each class; NaN for a class without examples.
        balanced_accuracy: Average recall of the classes with examples.
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
        probabilities: Averaged over draws, ``(N, classes)``, such as ``prediction.mean``.
        y: Right classes ``(N,)``, integers.
        num_bins: Number of bins of the calibration error.

    Raises:
        ValueError: If shapes do not fit, or a row is no vector of probabilities.

    Example:
        >>> scores = classification_scores(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0]))
        >>> scores.accuracy, round(scores.brier, 2)
        (0.5, 0.65)

    References:
        Guo et al. (2017), "On calibration of modern neural networks", Eq. 3; Brier (1950),
        "Verification of forecasts expressed in terms of probability".
    """
    p = checked_probabilities("probabilities", probabilities)
    y, size = checked_classes("y", y, p), p.shape[-1]
    brier = _library("scoringrules").brier_score(one_hot(y, size), p, backend="torch")
    is_right = p.argmax(-1) == y
    recall = y[is_right].bincount(minlength=size) / y.bincount(minlength=size).double()
    _, share, accuracy, confidence = confidence_bins(p, y, num_bins)
    return ClassificationScores(
        accuracy=float(is_right.double().mean()),
        nll=float(nll_loss(p.log(), y)),
        calibration_error=float((share * (accuracy - confidence).abs()).sum()),
        brier=float(brier.sum(-1).mean()),
        recall=tuple(recall.tolist()),
        balanced_accuracy=float(recall.nanmean()),
    )


def confidence_bins(
    probabilities: Tensor, y: Tensor, num_bins: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers, shares of examples, accuracies and average confidences of the filled bins.

    Bin m of M, from 0, holds confidences in (m / M, (m + 1) / M]: Guo et al. (2017), section 2.
    """
    confidence, guess = probabilities.max(-1)
    # Two roundings of single precision less, since 0.6 in it is above 9 / 15.
    tolerance = 2 * torch.finfo(torch.float32).eps
    place = (confidence.double() * num_bins * (1 - tolerance)).ceil() - 1
    bins, index, counts = place.unique(return_inverse=True, return_counts=True)
    accuracy, average = (
        confidence.new_zeros(len(counts)).index_add(0, index, each) / counts
        for each in ((guess == y).to(confidence), confidence)
    )
    return bins, counts / len(index), accuracy, average


@dataclass(frozen=True)
class DetectionScores:
    """Scores of the detection of examples from outside the data distribution.

    Attributes:
        auroc: Area under the receiver operating characteristic: the probability that an example from
            outside has the higher uncertainty, where ties count one half; 1/2 by chance.
        aupr: Average precision of the detection of examples from outside; their share by chance.
        aupr_inside: Average precision of the detection of examples inside, by low uncertainty.
        fpr_at_95: Share of false alarms at the threshold that detects at least 95% of the examples from
            outside.
    """

    auroc: float
    aupr: float
    aupr_inside: float
    fpr_at_95: float


@checked
def detection_scores(inside: Tensor, outside: Tensor) -> DetectionScores:
    """Score the detection of out-of-distribution examples by an uncertainty.

    Args:
        inside: Uncertainties of examples from the data distribution, ``(N,)``, such as
            ``prediction.entropy`` or ``prediction.mutual_information``.
        outside: Uncertainties of examples from elsewhere, ``(M,)``.

    Raises:
        ValueError: If a tensor is empty, or a number is not finite.

    Example:
        >>> scores = detection_scores(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
        >>> round(scores.auroc, 3), round(scores.fpr_at_95, 3)
        (0.833, 0.333)

    References:
        Hendrycks, Mazeika and Dietterich (2019), "Deep anomaly detection with outlier exposure",
        Section 4.1.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        check_numbers(name, scores)
        check_vector(name, scores)
    values = torch.cat([inside.detach().double(), outside.detach().double().to(inside.device)])
    # Ranks as shares, because torchmetrics treats numbers beyond [0, 1] as logits.
    _, ranks = values.unique(return_inverse=True)
    share = ranks.double() / len(values)
    is_outside = torch.arange(len(values), device=values.device) >= len(inside)
    curves = _library("torchmetrics.functional.classification")
    false_alarms, found, _ = curves.binary_roc(share, is_outside.long())
    return DetectionScores(
        auroc=float(curves.binary_auroc(share, is_outside.long())),
        aupr=float(curves.binary_average_precision(share, is_outside.long())),
        aupr_inside=float(curves.binary_average_precision(1 - share, (~is_outside).long())),
        fpr_at_95=float(false_alarms[found >= 0.95].min()),
    )


@dataclass(frozen=True)
class RiskCoverage:
    """The risk at each coverage.

    Attributes:
        coverage: Share of examples that are answered, ``(N,)``: 1/N, 2/N, up to 1.
        risk: Average loss of this share of the most certain examples, ``(N,)``.
        area: Average of the risk over all coverages, the area under the curve (AURC).
        excess_area: The area minus its minimum, for examples in the order of their losses.
    """

    coverage: Tensor
    risk: Tensor
    area: float
    excess_area: float


@checked
def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    r"""Return the average loss of the most certain examples, as a function of their share.

    With the examples in the order of ascending uncertainty,

    .. math:: \mathrm{risk}(k / N) = \frac{1}{k} \sum_{i \le k} \mathrm{loss}_i.

    Examples of equal uncertainty count with their average loss, the expectation over their orders.

    Args:
        uncertainty: One number for each example ``(N,)``, such as an entropy.
        loss: Loss of each example ``(N,)``, such as ``(guess != y).double()``.

    Raises:
        ValueError: If shapes differ, or a number is not finite.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.0, 1.0, 0.0]))
        >>> [round(float(risk), 3) for risk in curve.risk]
        [0.0, 0.0, 0.333]
        >>> curve.excess_area
        0.0

    References:
        Geifman, Uziel and El-Yaniv (2019), "Bias-reduced uncertainty estimation for deep neural
        classifiers".
    """
    uncertainty, loss = same_shape_doubles(uncertainty=uncertainty, loss=loss)
    check_vector("uncertainty", uncertainty)
    _, group, counts = uncertainty.unique(return_inverse=True, return_counts=True)
    averages = loss.new_zeros(len(counts)).index_add(0, group, loss) / counts
    number = torch.arange(1, len(loss) + 1, device=loss.device)
    risk = averages.repeat_interleave(counts).cumsum(0) / number
    best = loss.sort().values.cumsum(0) / number
    return RiskCoverage(
        coverage=number.double() / len(loss),
        risk=risk,
        area=float(risk.mean()),
        excess_area=float((risk - best).mean()),
    )


def _library(module: str) -> Any:
    """Import an optional library at its first use; torchmetrics takes seconds."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f'{name} is needed: `pip install "pyro-structvi[metrics]"`.') from error
