"""Distances between the predictions of two posteriors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_structvi._checks import check_shape, checked
from pyro_structvi.metrics.inputs import check_numbers, checked_probabilities


@dataclass(frozen=True)
class PredictiveDistance:
    """Distance of predictions from a reference, averaged over inputs, in the targets' units.

    Attributes:
        mean_difference: Average absolute difference of predictive means.
        scale_ratio: Geometric mean of the ratio of predictive standard deviations; below 1 the
            predictions are overconfident. Zero, infinite or NaN where draws are constant at an input.
        wasserstein: Average 1-Wasserstein distance, as by :func:`wasserstein`.
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

    Raises:
        ValueError: If the numbers of inputs differ, or there is a single draw.

    Example:
        >>> draws = torch.randn(500, 3)
        >>> round(predictive_distance(draws + 1.0, draws).mean_difference, 3)
        1.0
    """
    ours, theirs = _columns(functions=functions, reference=reference)
    for name, draws in (("functions", ours), ("reference", theirs)):
        if len(draws) < 2:
            raise ValueError(f"`{name}` must hold at least 2 draws at each input, but got 1.")
    return PredictiveDistance(
        mean_difference=float((ours.mean(0) - theirs.mean(0)).abs().mean()),
        scale_ratio=float((ours.std(0) / theirs.std(0)).log().mean().exp()),
        wasserstein=float(_wasserstein(ours, theirs).mean()),
    )


@checked
def wasserstein(draws: Tensor, reference: Tensor) -> float:
    r"""Return the 1-Wasserstein distance of two predictive distributions, averaged over inputs.

    For the distribution functions F and G of the draws at an input it is

    .. math:: \int |F(t) - G(t)| \, dt.

    Args:
        draws: Draws ``(S, N, *event)``; each element has a separate distribution.
        reference: Draws of the reference at the same inputs; their number may differ.

    Raises:
        ValueError: If the numbers of inputs differ, or a number is not finite.

    Example:
        >>> wasserstein(torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [2.0]]))
        2.0

    References:
        Villani (2009), "Optimal transport".
    """
    return float(_wasserstein(*_columns(draws=draws, reference=reference)).mean())


@checked
def agreement(probabilities: Tensor, reference: Tensor) -> float:
    """Return the share of examples, from 0 to 1, with the same most probable class as the reference.

    Args:
        probabilities: Averaged over draws, ``(N, classes)``; ties count as the first class.
        reference: Probabilities of the reference, of the same shape.

    Raises:
        ValueError: If shapes differ, or a row is no vector of probabilities.

    Example:
        >>> reference = torch.tensor([[0.6, 0.4], [0.1, 0.9]])
        >>> agreement(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), reference)
        0.5

    References:
        Wilson et al. (2022), "Evaluating approximate inference in Bayesian deep learning".
    """
    probabilities, reference = _class_probabilities(probabilities, reference)
    return float((probabilities.argmax(-1) == reference.argmax(-1)).double().mean())


@checked
def total_variation(probabilities: Tensor, reference: Tensor) -> float:
    r"""Return the total variation distance of class probabilities, from 0 to 1, averaged over examples.

    .. math:: \frac{1}{N} \sum_n \frac12 \sum_c |p_n(c) - q_n(c)|

    Arguments and errors as for :func:`agreement`.

    Example:
        >>> total_variation(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]]))
        0.25
    """
    probabilities, reference = _class_probabilities(probabilities, reference)
    return float((probabilities - reference).abs().sum(-1).mean() / 2)


def _class_probabilities(probabilities: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    ours = checked_probabilities("probabilities", probabilities)
    theirs = checked_probabilities("reference", reference)
    check_shape("reference", reference, probabilities.shape, "that of `probabilities`")
    return ours, theirs.to(ours.device)


def _columns(**tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sets of draws in float64, ``(S, inputs)`` and ``(T, inputs)``, or raise."""
    for name, tensor in tensors.items():
        check_numbers(name, tensor, dim=2)
    ours, theirs = (tensor.detach().flatten(1).double() for tensor in tensors.values())
    if ours.shape[1] != theirs.shape[1]:
        first, second = (f"`{name}`" for name in tensors)
        raise ValueError(
            f"{first} and {second} must be draws at the same inputs, but got "
            f"{ours.shape[1]} and {theirs.shape[1]} of them."
        )
    return ours, theirs.to(ours.device)


def _wasserstein(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the distance of the draws in each column."""
    values, order = torch.cat([ours, theirs]).sort(0)
    # F - G between neighbours, times both numbers of draws: integers without rounding errors.
    is_ours = order < len(ours)
    steps = torch.where(is_ours, len(theirs), -len(ours))
    heights = steps.cumsum(0)[:-1].abs().double()
    return (heights * values.diff(dim=0)).sum(0) / (len(ours) * len(theirs))
