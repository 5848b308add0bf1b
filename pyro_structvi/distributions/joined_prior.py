"""The prior of a weight and its bias, which are independent, as one over the joined matrix."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, register_kl

from pyro_structvi.distributions.kl_to_normals import has_one_scale, prior_terms
from pyro_structvi.distributions.weight_distribution import WeightDistribution


class JoinedPrior(Distribution):
    """Independent priors of a weight ``(out, *rest)`` and a bias, over ``(out, in + 1)``.

    The KL from a :class:`WeightDistribution` is registered where both are independent normals.

    Args:
        weight: The weight's prior.
        bias: The bias's prior, over ``(out,)``.

    Example:
        >>> from pyro.distributions import Normal
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> weight = Normal(torch.zeros(2, 3), 1.0).to_event(2)
        >>> prior = JoinedPrior(weight, Normal(torch.zeros(2), 1.0).to_event(1))
        >>> q = MeanFieldNormal(torch.zeros(2, 4), torch.tensor(1.0))
        >>> torch.distributions.kl_divergence(q, prior)
        tensor(0.)
    """

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_shape = torch.Size(weight.batch_shape + weight.event_shape)
        joined = torch.Size([self.weight_shape[0], self.weight_shape[1:].numel() + 1])
        super().__init__(torch.Size(), joined, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of ``(out, in + 1)``, in nats."""
        weight, bias = value[..., :-1].reshape(self.weight_shape), value[..., -1]
        total: Tensor = self.weight.log_prob(weight).sum() + self.bias.log_prob(bias).sum()
        return total


def _base(prior: Any) -> Any:
    while isinstance(prior, Independent):
        prior = prior.base_dist
    return prior


@register_kl(WeightDistribution, JoinedPrior)
def _kl_weight_joined(q: WeightDistribution, p: JoinedPrior) -> Tensor:
    """KL to independent normals, of which the last column has its own."""
    weight, bias = _base(p.weight), _base(p.bias)
    if not (isinstance(weight, Normal) and isinstance(bias, Normal)):
        raise NotImplementedError
    mean, variance = q.mean, q.variance

    def terms(prior: Normal, column: slice | int, shape: torch.Size) -> Tensor:
        center, spread = mean[:, column].reshape(shape), variance[:, column].reshape(shape)
        if has_one_scale(prior, shape, len(shape)):
            spread = spread.sum()
        return prior_terms(prior, center, spread, len(shape))

    of_weight = terms(weight, slice(None, -1), p.weight_shape)
    of_bias = terms(bias, -1, p.weight_shape[:1])
    return 0.5 * (of_weight + of_bias - q.log_det_covariance)
