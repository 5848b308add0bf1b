"""Split conformal prediction: intervals and sets of classes whose coverage holds for any model."""

import math

import torch
from torch import Tensor

from pyro_structvi._checks import check_finite, check_same_kind, check_shape, checked
from pyro_structvi.metrics.inputs import check_not_empty, checked_classes, checked_probabilities
from pyro_structvi.posterior.prediction import Level, Prediction, observed_targets


@checked
def conformal_interval(
    prediction: Prediction, calibration: Prediction, y: Tensor, level: Level = 0.9
) -> tuple[Tensor, Tensor]:
    r"""Return intervals that contain new targets with a probability, whatever the model.

    The quantiles of a prediction move by the same amount for all inputs, found on other data:

    .. math:: [\, l(x) - q, \; u(x) + q \,], \qquad q = s_{(k)}, \qquad
        s_i = \max(l(x_i) - y_i, \; y_i - u(x_i)), \qquad k = \lceil (n + 1) \, \mathrm{level} \rceil.

    If the n examples and a new one are exchangeable, the probability is at least the level, on average
    over data and inputs, and k / (n + 1) for continuous scores. The ends are infinite for ``k > n``.
    Both predictions must have the same functions, by the same draws or by the same seed: with separate
    draws they are not exchangeable, and the coverage is lower.

    Args:
        prediction: A prediction at new inputs.
        calibration: A prediction by the same draws at n inputs that no fit has used.
        y: Their targets ``(n, *event)``. Each element of a target has its own shift.
        level: The probability.

    Returns:
        Lower and upper ends, each ``(N, *event)``. An interval is empty if its lower end is the larger
        one, as for too wide predictions.

    Raises:
        ValueError: If there is no calibration, shapes differ, the model masks targets of the
            calibration, or the level is not between 0 and 1.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 10, noise_scale=0.1)
        >>> guide, x = MeanFieldGuide(model), torch.randn(30, 1)  # to be fitted
        >>> seed, calibration = torch.manual_seed(0), predict(model, guide, x[:20])
        >>> seed, prediction = torch.manual_seed(0), predict(model, guide, x[20:])
        >>> low, high = conformal_interval(prediction, calibration, torch.randn(20, 1))
        >>> low.shape
        torch.Size([10, 1])

    References:
        Romano, Patterson and Candes (2019), "Conformalized quantile regression", theorem 1.
    """
    check_not_empty("y", y)
    lower, upper = calibration.interval(level)
    check_shape("y", y, lower.shape, "that of the predictions", by="calibration.mean")
    check_same_kind("y", y, "calibration.mean", lower)
    check_finite("y", y)
    if not bool(observed_targets(calibration, y).all()):
        raise ValueError(
            "`calibration` must have observed targets alone, but the model masks some. Predict at those "
            "inputs where it masks none."
        )
    shift = _quantile(torch.maximum(lower - y, y - upper), level)
    low, high = prediction.interval(level)
    check_shape(
        "prediction.mean", low, (len(low), *shift.shape), "(N, *event)", by="calibration.mean"
    )
    return low - shift, high + shift


@checked
def conformal_sets(
    probabilities: Tensor, calibration: Tensor, y: Tensor, level: Level = 0.9
) -> Tensor:
    r"""Return sets of classes that contain new classes with a probability, whatever the model.

    .. math:: \{ c : p_c(x) \ge 1 - q \}, \qquad q = s_{(k)}, \qquad s_i = 1 - p_{y_i}(x_i), \qquad
        k = \lceil (n + 1) \, \mathrm{level} \rceil.

    The probability is as for :func:`conformal_interval`. A set may be empty or hold all classes.

    Args:
        probabilities: Class probabilities at new inputs ``(N, classes)``, such as ``prediction.mean``.
        calibration: Those at n inputs that no fit has used ``(n, classes)``.
        y: Their classes ``(n,)``.
        level: The probability.

    Raises:
        ValueError: If shapes differ, probabilities do not sum to 1, or the level is not between 0 and 1.

    Example:
        >>> calibration = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]])
        >>> new = torch.tensor([[0.95, 0.05], [0.5, 0.5]])
        >>> conformal_sets(new, calibration, torch.tensor([0, 0, 1, 1]), level=0.5)
        tensor([[ True, False],
                [False, False]])

    References:
        Sadinle, Lei and Wasserman (2019), "Least ambiguous set-valued classifiers with bounded error
        levels".
    """
    known = checked_probabilities("calibration", calibration)
    check_shape("y", y, known.shape[:1], "(n,)", by="calibration")
    scores = 1 - known[torch.arange(len(known)), checked_classes("y", y, known)]
    new = checked_probabilities("probabilities", probabilities)
    check_shape("probabilities", new, (len(new), known.shape[-1]), "that of `calibration`")
    return 1 - new <= _quantile(scores, level)


def _quantile(scores: Tensor, level: float) -> Tensor:
    """Return the k-th smallest of n scores ``(n, *event)``, infinity for k > n."""
    # Rounding to 12 digits keeps 0.8 * 10 from becoming 8.000000000000002.
    rank = max(1, math.ceil(round((len(scores) + 1) * level, 12)))
    if rank > len(scores):
        return torch.full_like(scores[0], math.inf)
    return scores.sort(0).values[rank - 1]
