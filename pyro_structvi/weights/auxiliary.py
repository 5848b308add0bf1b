"""Auxiliary guide variable, absent from the model."""

from typing import Any, ClassVar

from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints, kl_divergence

from pyro_structvi._checks import checked
from pyro_structvi.linalg.precision import autocast_off
from pyro_structvi.weights.arguments import as_expanded, as_size, check_value


class Auxiliary(TorchDistribution):
    r"""The posterior of an auxiliary variable, scored against the prior it was given.

    A guide that draws an auxiliary variable U beside the model's W bounds the evidence by :math:`E[\log
    p(y, W) + \log r(U \mid W) - \log q(W, U)]`. Where r comes from a joint prior p(U) p(W | U) whose
    marginal is p(W), this is the bound without ``log r`` if U is scored by ``log q(U) - log p(U)`` and
    W by ``log p(W) + log q(W | U) - log p(W | U)``. The first is ``log_prob`` here.

    Without a prior the variable is a part of W itself, whose own site has all of ``log p(W)``.

    Args:
        posterior: The distribution of the variable in the guide.
        prior: Its distribution in the joint prior, or None.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    @checked
    def __init__(self, posterior: Distribution, prior: Distribution | None = None) -> None:
        self.posterior: Any = posterior
        self.prior: Any = prior
        super().__init__(posterior.batch_shape, posterior.event_shape, validate_args=False)

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Any:
        """That of the posterior."""
        return self.posterior.support

    @property
    def mean(self) -> Tensor:
        """The mean of the posterior."""
        mean: Tensor = self.posterior.mean
        return mean

    @property
    def variance(self) -> Tensor:
        """The variance of each element in the posterior."""
        variance: Tensor = self.posterior.variance
        return variance

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw the variable from its posterior."""
        draw: Tensor = self.posterior.rsample(as_size("sample_shape", sample_shape))
        return draw

    def log_prob(self, value: Tensor) -> Tensor:
        """Return ``log q - log p``, in nats; without a prior ``log q``."""
        if self.posterior._validate_args:
            shapes = self.batch_shape, self.event_shape
            check_value(value, "posterior", self.posterior.mean, *shapes)
        ratio: Tensor = self.posterior.log_prob(value)
        return ratio if self.prior is None else ratio - self.prior.log_prob(value)

    def kl(self) -> Tensor:
        """Return the mean of :meth:`log_prob`: a divergence, or without a prior minus an entropy."""
        with autocast_off(self.posterior.mean):
            if self.prior is None:
                nats: Tensor = -self.posterior.entropy()
                return nats
            return kl_divergence(self.posterior, self.prior)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Auxiliary":
        """Return this with a larger batch shape."""
        batch_shape = as_expanded(batch_shape, self.batch_shape)
        prior = None if self.prior is None else self.prior.expand(batch_shape)
        return Auxiliary(self.posterior.expand(batch_shape), prior)
