"""Scores of predicted numbers: errors, densities, the continuous ranked probability score, intervals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_structvi._checks import Share, brief, check_finite, check_real, check_shape, checked
from pyro_structvi.metrics.inputs import check_not_empty, same_shape_doubles
from pyro_structvi.posterior.prediction import Prediction

DRAWS_OF_A_POINT = 100


@dataclass(frozen=True)
class RegressionScores:
    """Scores of a prediction of numbers.

    Attributes:
        rmse: Root of the average squared error of the predictive mean, in the targets' units.
        log_density: Average log of the predictive density of a target, in nats.
        crps: Average continuous ranked probability score, in the targets' units.
        coverage: Share of targets in their predictive intervals; the level if these are right.
        width: Average width of the intervals, in the targets' units.
    """

    rmse: float
    log_density: float
    crps: float
    coverage: float
    width: float


@checked
def regression_scores(prediction: Prediction, y: Tensor, level: Share = 0.95) -> RegressionScores:
    """Score a prediction of numbers.

    The continuous ranked probability score takes one observation from each draw of the posterior,
    and 100 observations where there is a single draw, as of a point estimate. They are drawn by torch's
    random state.

    Args:
        prediction: What ``predict`` returned for inputs and their targets, given as ``y=``.
        y: The same targets ``(N, *event)``, in the shape of ``prediction.mean``.
        level: Probability of the intervals, strictly between 0 and 1.

    Returns:
        The scores.

    Raises:
        TypeError: If ``prediction`` is no prediction.
        ValueError: If shapes differ, the prediction has no density of the targets, or it was streamed.

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
        Eq. 20 and 21.
    """
    if prediction.log_density is None:
        raise ValueError(
            "`prediction` must have a log density of the targets, but got None. Call "
            "`predict(model, posterior, x, y=y)`."
        )
    error = rmse(prediction.mean, y)
    lower, upper = prediction.interval(level)
    draws = prediction.sample_observations()
    if len(draws) == 1:
        draws = prediction.sample_observations(num_samples=DRAWS_OF_A_POINT)
    return RegressionScores(
        rmse=error,
        log_density=log_predictive_density(prediction.log_density),
        crps=float(crps(draws, y).mean()),
        coverage=interval_coverage(lower, upper, y),
        width=interval_width(lower, upper),
    )


@checked
def rmse(mean: Tensor, y: Tensor) -> float:
    r"""Return the root of the average squared error, over all targets.

    .. math:: \sqrt{\frac{1}{N} \sum_n (\mathrm{mean}_n - y_n)^2}

    Args:
        mean: Predicted means ``(N, *event)``.
        y: Targets of the same shape.

    Returns:
        The root, in the targets' units.

    Raises:
        ValueError: If shapes differ, or a number is not finite.

    Example:
        >>> rmse(torch.zeros(2), torch.tensor([1.0, 7.0]))
        5.0
    """
    mean, y = same_shape_doubles(mean=mean, y=y)
    return float((mean - y).square().mean().sqrt())


@checked
def log_predictive_density(log_density: Tensor) -> float:
    """Return the average log predictive density of the targets.

    Args:
        log_density: Log of the predictive density of each target, ``(N,)``, in nats: a prediction's
            ``log_density``, which averages densities over draws.

    Returns:
        The average in nats; minus infinity if a density is zero.

    Raises:
        ValueError: If there are no values, or one is NaN or infinite.

    Example:
        >>> log_predictive_density(torch.tensor([-1.0, -2.0]))
        -1.5

    References:
        Gneiting and Raftery (2007), "Strictly proper scoring rules, prediction, and estimation",
        Section 4.1, the logarithmic score.
    """
    check_real("log_density", log_density, dim=1)
    check_not_empty("log_density", log_density)
    if log_density.dim() > 1:
        raise ValueError(
            f"`log_density` must have one number for each target, (N,), but got {brief(log_density)}. "
            "Write `log_density.logsumexp(0) - math.log(len(log_density))` to average over draws."
        )
    if not bool((log_density < torch.inf).all()):  # NaN too
        raise ValueError(
            "`log_density` must be finite everywhere, or minus infinity where a density is zero, but is "
            "not."
        )
    return float(log_density.double().mean())


@checked
def crps(draws: Tensor, y: Tensor) -> Tensor:
    r"""Return the continuous ranked probability score of each target.

    It is the integral of the squared difference between the predictive distribution function and the
    step at the target, which for independent draws x and x' of the predictive distribution is

    .. math:: \mathrm{E}|x - y| - \tfrac12 \mathrm{E}|x - x'|.

    Both averages are estimated without bias; the second from all pairs of two different draws, by
    sorting, in a time of S log S:

    .. math:: \frac{1}{S} \sum_i |x_i - y| - \frac{1}{S (S - 1)} \sum_i (2 i - S - 1) \, x_{(i)}.

    So an estimate may be negative. A distribution that is certain has the absolute error for its score.

    Args:
        draws: Observations drawn from the predictive distribution ``(S, N, *event)``, at least 2.
        y: Targets ``(N, *event)``. Each number is scored by itself.

    Returns:
        The scores, in the shape and the units of ``y``, in double; the lower the better.

    Raises:
        ValueError: If shapes do not fit, there are fewer than 2 draws, or a number is not finite.

    Example:
        >>> crps(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([1.0]))
        tensor([0.], dtype=torch.float64)

    References:
        Gneiting and Raftery (2007), "Strictly proper scoring rules, prediction, and estimation",
        Eq. 20 and 21. Zamo and Naveau (2018), "Estimation of the continuous ranked probability score
        with limited information", the fair estimator.
    """
    check_real("draws", draws, dim=1)
    check_finite("draws", draws)
    (y,) = same_shape_doubles(y=y)
    check_shape("draws", draws, (len(draws), *y.shape), "(S, *y.shape)", by="y")
    count = len(draws)
    if count < 2:
        raise ValueError(f"`draws` must hold at least 2 draws of each target, but got {count}.")
    gaps = (draws.double().to(y.device) - y).sort(0).values  # from `y`, which loses no digits
    place = 2 * torch.arange(1, count + 1, device=y.device) - count - 1
    spread = torch.tensordot(place.double(), gaps, 1) / (count * (count - 1))
    scores: Tensor = gaps.abs().mean(0) - spread
    return scores


@checked
def interval_coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Return the share of targets that lie in their intervals, ends included.

    Args:
        lower: Lower ends ``(N, *event)``.
        upper: Upper ends of the same shape.
        y: Targets of the same shape. Each number counts by itself.

    Returns:
        The share, from 0 to 1.

    Raises:
        ValueError: If shapes differ, a number is not finite, or a lower end is above its upper end.

    Example:
        >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 3.0]))
        0.5
    """
    lower, upper, y = same_shape_doubles(lower=lower, upper=upper, y=y)
    _check_ends(lower, upper)
    return float(((lower <= y) & (y <= upper)).double().mean())


@checked
def interval_width(lower: Tensor, upper: Tensor) -> float:
    """Return the average width of intervals.

    Args:
        lower: Lower ends ``(N, *event)``.
        upper: Upper ends of the same shape.

    Returns:
        The average, in the targets' units.

    Raises:
        ValueError: If shapes differ, a number is not finite, or a lower end is above its upper end.

    Example:
        >>> interval_width(torch.zeros(2), torch.tensor([1.0, 3.0]))
        2.0
    """
    lower, upper = same_shape_doubles(lower=lower, upper=upper)
    _check_ends(lower, upper)
    return float((upper - lower).mean())


def _check_ends(lower: Tensor, upper: Tensor) -> None:
    if bool((lower > upper).any()):
        raise ValueError(
            "`lower` must be at most `upper` everywhere, but is above it. Swap the two ends."
        )
