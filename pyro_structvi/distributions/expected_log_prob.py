"""The mean log density of a prior under a normal posterior, element by element."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Laplace, Normal

from pyro_structvi.distributions.own_tensors import base_of

_FAR = 40.0  # standard deviations, at which a normal's density is zero in double precision


def expected_neg_log_prob(mean: Tensor, variance: Tensor, prior: Any) -> Tensor:
    r"""Return :math:`E[-\log p(w)]` of each element of a normal, for normal and Laplace priors.

    For a normal prior that holds for any distribution with these moments. For a Laplace prior it uses
    the mean distance from its center m, with :math:`d = \mu - m`,

    .. math:: E|w - m| = \sigma \sqrt{2 / \pi}\, e^{-d^2 / 2 \sigma^2}
        + d\, \mathrm{erf}\left( \frac{d}{\sigma \sqrt 2} \right)

    Args:
        mean: Of each element, ``(*batch, *event)``.
        variance: Likewise; zero for an element that is known.
        prior: The prior, of the same shape, or one that defines ``expected_neg_log_prob``.

    Returns:
        Nats, of the shape of the mean, with finite gradients where the variance is zero too.

    Raises:
        NotImplementedError: If the prior is another one.

    Example:
        >>> zero, one = torch.zeros(()), torch.ones(())
        >>> expected_neg_log_prob(zero, one, Laplace(zero, one))  # log 2 + sqrt(2 / pi)
        tensor(1.4910)
    """
    prior = base_of(prior)
    if hasattr(prior, "expected_neg_log_prob"):
        own: Tensor = prior.expected_neg_log_prob(mean, variance)
        return own
    if isinstance(prior, Normal):
        nats: Tensor = variance / (2 * prior.scale.square()) - prior.log_prob(mean)
        return nats
    if isinstance(prior, Laplace):
        distance = _mean_distance(mean - prior.loc, variance)
        return (2 * prior.scale).log() + distance / prior.scale
    raise NotImplementedError


def _mean_distance(difference: Tensor, variance: Tensor) -> Tensor:
    """Return ``E|x|`` for a normal x with this mean and variance."""
    scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    # Nothing is lost by a wider normal where its mean is far out, and quotients stay small.
    scale = torch.maximum(scale, difference.detach().abs() / _FAR)
    ratio = difference / scale
    spread = math.sqrt(2 / math.pi) * scale * torch.exp(-0.5 * ratio.square())
    distance: Tensor = spread + difference * torch.erf(ratio / math.sqrt(2))
    return distance
