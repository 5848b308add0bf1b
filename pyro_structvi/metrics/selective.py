"""Selective prediction: the risk that is left when the least certain examples are not answered."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_structvi._checks import checked
from pyro_structvi.metrics.inputs import check_vector, same_shape_doubles
from pyro_structvi.metrics.ties import in_order_of


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
