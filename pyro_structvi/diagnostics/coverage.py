"""Coverage of predictive intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyro_structvi._checks import check_finite, check_real, check_shape, checked
from pyro_structvi.posterior.prediction import Level, Prediction, observed_targets


@dataclass(frozen=True)
class Coverage:
    """Coverage of the intervals of one level.

    Attributes:
        observed: The share of observations within their intervals, bounds included.
        standard_error: The standard deviation of this share for correct intervals,
            ``sqrt(level (1 - level) / N)``.
    """

    observed: float
    standard_error: float


@checked
def expected_coverage(
    prediction: Prediction, y: Tensor, levels: Sequence[Level] = (0.5, 0.8, 0.9, 0.95)
) -> dict[float, Coverage]:
    r"""Return the share of new observations within the predictive intervals of each level.

    .. math:: \hat c = \frac1N \sum_n 1[l_n \le y_n \le u_n]

    How to read it: the share should be the level, up to two standard errors; below it the predictions
    are overconfident. Compare widths or a log density as well, since intervals of the marginal
    distribution of y have the right coverage too. On training data the coverage is too high.

    Args:
        prediction: A prediction at N inputs.
        y: Observations at these inputs, ``(N, *event)``. Several targets of an example all count; the
            standard error is then an upper bound. Elements that the model masks do not count, if the
            prediction has ``observed``, by ``predict(..., y=y)``.
        levels: Levels of the intervals, each above 0 and below 1.

    Raises:
        ValueError: If a level is not between 0 and 1, ``levels`` is empty, ``y`` does not fit, or the
            prediction has no intervals, as for classes.

    Example:
        >>> import torch
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
        >>> net = bayesianize(torch.nn.Linear(1, 1, bias=False), prior=1.0)
        >>> model = Regressor(net, num_data=2, noise_scale=1.0)
        >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(2, 1))  # N(0, 1) at zero
        >>> expected_coverage(prediction, torch.tensor([[0.1], [2.0]]), levels=[0.5])[0.5].observed
        0.5

    References:
        Gneiting, Balabdaoui and Raftery (2007), "Probabilistic forecasts, calibration and sharpness".
    """
    if not len(levels):
        raise ValueError("`levels` must hold at least one level, but is empty.")
    check_real("y", y, dim=1, whole=True)
    check_finite("y", y)
    found = {}
    for level in levels:
        lower, upper = prediction.interval(level)
        check_shape("y", y, lower.shape, "(N, *event)", by="prediction")
        seen = observed_targets(prediction, y)
        held = ((lower <= y) & (y <= upper))[seen]
        error = math.sqrt(level * (1 - level) / int(seen.reshape(len(y), -1).any(1).sum()))
        found[float(level)] = Coverage(float(held.double().mean()), error)
    return found
