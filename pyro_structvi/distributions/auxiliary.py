"""A variable that a guide has and the model has not."""

from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_structvi._autocast import autocast_off


class Auxiliary(TorchDistribution):
    r"""The posterior of an auxiliary variable, scored against the prior it was given.

    A guide that draws an auxiliary variable U beside the model's W bounds the evidence by :math:`E[\log
    p(y, W) + \log r(U \mid W) - \log q(W, U)]`. Where r comes from a joint prior p(U) p(W | U) whose
    marginal is p(W), this is the bound without ``log r`` if U is scored by ``log q(U) - log p(U)`` and
    W by ``log p(W) + log q(W | U) - log p(W | U)``. The first is ``log_prob`` here.

    Args:
        posterior: The law of the variable in the guide.
        prior: Its law in the joint prior.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, posterior: Any, prior: Any) -> None:
        self.posterior, self.prior = posterior, prior
        super().__init__(posterior.batch_shape, posterior.event_shape, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw the variable from its posterior."""
        draw: Tensor = self.posterior.rsample(torch.Size(sample_shape))
        return draw

    def log_prob(self, value: Tensor) -> Tensor:
        """Return ``log q - log p``, in nats."""
        ratio: Tensor = self.posterior.log_prob(value) - self.prior.log_prob(value)
        return ratio

    def kl(self) -> Tensor:
        """Return the divergence of the posterior from the prior, in nats."""
        with autocast_off(self.posterior.mean):
            return kl_divergence(self.posterior, self.prior)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Auxiliary":
        """Return this with a larger batch shape."""
        return Auxiliary(self.posterior.expand(batch_shape), self.prior.expand(batch_shape))
