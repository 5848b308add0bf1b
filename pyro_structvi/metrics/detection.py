"""Uncertainties: examples from elsewhere, and examples that are left out."""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor

from pyro_structvi._checks import check_finite, check_real, checked
from pyro_structvi.metrics.classification import in_order_of
from pyro_structvi.metrics.inputs import (
    check_not_empty,
    check_vector,
    checked_probabilities,
    same_shape_doubles,
)
from pyro_structvi.posterior.prediction import Prediction


@dataclass(frozen=True)
class RiskCoverage:
    """The risk at each coverage.

    Attributes:
        coverage: Share of examples that are answered, ``(N,)``: 1/N, 2/N, up to 1.
        risk: Average loss of as many of the most certain examples, ``(N,)``, in units of the loss.
        area: Average of the risk over all coverages, which is the area under the curve (AURC).
        excess_area: What the area has beyond that of the best order, by the losses themselves; zero
            if uncertainty orders the examples as their losses do.
    """

    coverage: Tensor
    risk: Tensor
    area: float
    excess_area: float


@checked
def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    r"""Return the average loss of the most certain examples, for every number of them.

    With the examples in the order of ascending uncertainty,

    .. math:: \mathrm{risk}(k / N) = \frac{1}{k} \sum_{i \le k} \mathrm{loss}_i, \qquad
        \mathrm{area} = \frac{1}{N} \sum_k \mathrm{risk}(k / N).

    Where examples have equal uncertainty, each counts with the average loss of them, which is the
    expectation over their orders; the order in which examples are given does not matter.

    Args:
        uncertainty: One number for each example ``(N,)``, such as an entropy, in any units.
        loss: Of each example ``(N,)``, real numbers; ``(guess != y).double()`` for errors.

    Returns:
        The curve and its area.

    Raises:
        ValueError: If shapes differ, or a number is not finite.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.0, 1.0, 0.0]))
        >>> [round(float(risk), 3) for risk in curve.risk]
        [0.0, 0.0, 0.333]
        >>> curve.excess_area
        0.0

    References:
        Geifman and El-Yaniv (2017), "Selective classification for deep neural networks", for risk and
        coverage; Geifman, Uziel and El-Yaniv (2019), "Bias-reduced uncertainty estimation for deep
        neural classifiers", for the area and its excess.
    """
    uncertainty, loss = same_shape_doubles(uncertainty=uncertainty, loss=loss)
    check_vector("uncertainty", uncertainty)
    number = torch.arange(1, len(loss) + 1, device=loss.device)
    risk = in_order_of(uncertainty, loss).cumsum(0) / number
    best = loss.sort().values.cumsum(0) / number
    return RiskCoverage(
        coverage=number.double() / len(loss),
        risk=risk,
        area=float(risk.mean()),
        excess_area=float((risk - best).mean()),
    )


@dataclass(frozen=True)
class DetectionScores:
    """How well a score tells examples from outside from those inside.

    Attributes:
        auroc: Area under the receiver operating characteristic: the probability that an example from
            outside has the higher score, where ties count one half. 1/2 by chance.
        aupr: Area under precision and recall, as average precision, where the examples from
            outside are to be found. Their share by chance.
        aupr_inside: The same where the examples inside are to be found, by the lowest scores.
        fpr_at_95: Share of the examples inside that are taken for outside at the threshold at which
            at least 95% of those from outside are found; the lower the better.
    """

    auroc: float
    aupr: float
    aupr_inside: float
    fpr_at_95: float


@checked
def max_probability_score(probabilities: Tensor) -> Tensor:
    """Return one minus the probability of the most probable class.

    Args:
        probabilities: Averaged over draws, ``(N, classes)``; N may stand for several dimensions.

    Returns:
        One number for each example, ``(N,)``, in double; the higher, the more likely from outside.

    Raises:
        ValueError: If a row is no vector of probabilities.

    Example:
        >>> max_probability_score(torch.tensor([[0.75, 0.25]]))
        tensor([0.2500], dtype=torch.float64)

    References:
        Hendrycks and Gimpel (2017), "A baseline for detecting misclassified and out-of-distribution
        examples in neural networks".
    """
    return 1 - checked_probabilities("probabilities", probabilities).amax(-1)


@checked
def entropy_score(probabilities: Tensor) -> Tensor:
    r"""Return the entropy of class probabilities.

    .. math:: -\sum_c p(c) \log p(c)

    Args:
        probabilities: Averaged over draws, ``(N, classes)``; N may stand for several dimensions.

    Returns:
        One number for each example, ``(N,)``, in nats and in double; the higher, the more likely from
        outside.

    Raises:
        ValueError: If a row is no vector of probabilities.

    Example:
        >>> entropy_score(torch.tensor([[0.5, 0.5]]))
        tensor([0.6931], dtype=torch.float64)
    """
    return _entropy(checked_probabilities("probabilities", probabilities))


@checked
def mutual_information_score(draws: Tensor) -> Tensor:
    r"""Return the mutual information of class and weights.

    With the probabilities p_s of each draw and their average p,

    .. math:: H(p) - \frac{1}{S} \sum_s H(p_s).

    Args:
        draws: Class probabilities of each draw, ``(S, N, classes)``; N may stand for several dimensions.

    Returns:
        One number for each example, ``(N,)``, in nats and in double; the higher, the more likely from
        outside.

    Raises:
        ValueError: If a row is no vector of probabilities.

    Example:
        >>> mutual_information_score(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931], dtype=torch.float64)

    References:
        Houlsby et al. (2011), "Bayesian active learning for classification and preference learning",
        Eq. 2.
    """
    draws = checked_probabilities("draws", draws, dim=3)
    return (_entropy(draws.mean(0)) - _entropy(draws).mean(0)).clamp_min(0)


@checked
def ood_scores(prediction: Prediction) -> dict[str, Tensor]:
    """Return three scores by which examples from outside can be told.

    Args:
        prediction: What ``predict`` returned for a model of classes.

    Returns:
        Scores ``(N,)`` by name, ``"max_probability"``, ``"entropy"`` and ``"mutual_information"``; the
        higher, the more likely from outside. The first is one minus the probability.

    Raises:
        TypeError: If ``prediction`` is no prediction.
        ValueError: If it is none of class probabilities.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize, predict
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3)), num_data=10)
        >>> prediction = predict(model, MeanFieldGuide(model), torch.randn(5, 4), num_samples=20)
        >>> [*ood_scores(prediction)]
        ['max_probability', 'entropy', 'mutual_information']
    """
    return _ood_scores("prediction", prediction)


@checked
def detection_scores(inside: Tensor, outside: Tensor) -> DetectionScores:
    """Score how well a number for each example tells where it is from.

    Args:
        inside: Scores of examples of the kind that was trained on, ``(N,)``; the higher, the more
            likely from outside.
        outside: Scores of examples from elsewhere, ``(M,)``.

    Returns:
        Areas under curves, and the rate of false alarms. For the rate at which examples from
        outside pass where 95% of those inside do, write ``detection_scores(-outside, -inside)``.

    Raises:
        ValueError: If one has no examples, or a number is not finite.

    Example:
        >>> scores = detection_scores(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.5, 0.9]))
        >>> round(scores.auroc, 3), round(scores.fpr_at_95, 3)
        (0.833, 0.333)

    References:
        Hendrycks, Mazeika and Dietterich (2019), "Deep anomaly detection with outlier exposure",
        Section 4.1, where examples from outside are the ones to be found.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        check_real(name, scores)
        check_not_empty(name, scores)
        check_finite(name, scores)
        check_vector(name, scores)
    is_outside = np.repeat([0, 1], [len(inside), len(outside)])
    values = np.concatenate([each.detach().double().cpu().numpy() for each in (inside, outside)])
    false_alarms, found, _ = roc_curve(is_outside, values, drop_intermediate=False)
    return DetectionScores(
        auroc=float(roc_auc_score(is_outside, values)),
        aupr=float(average_precision_score(is_outside, values)),
        aupr_inside=float(average_precision_score(1 - is_outside, -values)),
        fpr_at_95=float(false_alarms[found >= 0.95].min()),
    )


@checked
def detect(
    prediction_inside: Prediction, prediction_outside: Prediction
) -> dict[str, DetectionScores]:
    """Score how well the uncertainties of a prediction tell where examples are from.

    Args:
        prediction_inside: What ``predict`` returned for examples of the kind that was trained on.
        prediction_outside: What it returned for examples from elsewhere.

    Returns:
        The scores by the names of :func:`ood_scores`.

    Raises:
        TypeError: If one is no prediction.
        ValueError: If one is none of class probabilities.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize, predict
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3)), num_data=10)
        >>> guide = MeanFieldGuide(model)
        >>> x = torch.randn(9, 4)
        >>> near, far = (predict(model, guide, size * x, num_samples=20) for size in (1, 9))
        >>> [*detect(near, far)]
        ['max_probability', 'entropy', 'mutual_information']
    """
    inside = _ood_scores("prediction_inside", prediction_inside)
    outside = _ood_scores("prediction_outside", prediction_outside)
    return {name: detection_scores(own, outside[name]) for name, own in inside.items()}


def _ood_scores(name: str, prediction: Prediction) -> dict[str, Tensor]:
    if prediction.entropy is None or prediction.mutual_information is None:
        raise ValueError(
            f"`{name}` must be of class probabilities, but has no entropy. Pass what `predict` "
            "returns for a `Classifier`."
        )
    probabilities = checked_probabilities(f"{name}.mean", prediction.mean)
    return {
        "max_probability": 1 - probabilities.amax(-1),
        "entropy": prediction.entropy.double(),
        "mutual_information": prediction.mutual_information.double(),
    }


def _entropy(probabilities: Tensor) -> Tensor:
    entropies: Tensor = torch.special.entr(probabilities)
    return entropies.sum(-1)
