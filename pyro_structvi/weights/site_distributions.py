"""Point masses, auxiliary variables, and quantiles of posteriors."""

from functools import singledispatch
from typing import Any, ClassVar

import torch
from pyro.distributions import Delta, TransformedDistribution
from pyro.distributions import Distribution as PyroDistribution
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, constraints, kl_divergence, register_kl
from torch.special import ndtri

from pyro_structvi._checks import check_finite, check_shape, checked, validates
from pyro_structvi.linalg.matrices import event_sum
from pyro_structvi.linalg.precision import autocast_off
from pyro_structvi.weights.arguments import as_expanded, as_size, check_parameters, check_value
from pyro_structvi.weights.kl import expected_neg_log_prob, normal_cross_entropy
from pyro_structvi.weights.torch_distributions import base_of
from pyro_structvi.weights.weight_distribution import GaussianWeight


class PointMass(Delta):
    r"""A known value. Its divergence from a prior p is :math:`E[-\log p(w)]`, in nats.

    That is the KL without the entropy of a point, which is minus infinity for every value. So a guide
    of points has the loss of a maximum a posteriori estimate. ``log_prob`` is zero at the value.

    Args:
        value: The value, ``(*batch, *event)``.
        event_dim: How many of its trailing dimensions are the event.
        mean: The mean that the value was drawn with, where another site of the guide drew it.
        variance: Likewise the variance of each element.
        validate_args: Whether to check arguments; Pyro's own setting when None.

    Raises:
        ValueError: If a tensor is not finite, or of another shape than ``value``, or if ``event_dim`` is
            negative or larger than the dimensions of the value.

    Example:
        >>> from pyro.distributions import Normal
        >>> from torch.distributions import kl_divergence
        >>> q = PointMass(torch.tensor([1.0, 2.0]), event_dim=1)
        >>> prior = Normal(torch.zeros(2), 1.0).to_event(1)
        >>> kl_divergence(q, prior) == -prior.log_prob(q.v)
        tensor(True)
    """

    @checked
    def __init__(
        self,
        value: Tensor,
        event_dim: int,
        mean: Tensor | None = None,
        variance: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if validates(validate_args):
            given = {"value": value, "mean": mean, "variance": variance}
            tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
            check_parameters(self, tensors, event_dim)
            for name, tensor in tensors.items():
                check_finite(name, tensor)
                check_shape(name, tensor, value.shape, "that of `value`")
            if variance is not None and bool((variance < 0).any()):
                raise ValueError("`variance` must be at least 0 everywhere, but is not.")
        super().__init__(value, event_dim=event_dim, validate_args=False)
        self._mean, self._variance = mean, variance

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the value, as ``pyro.sample`` does; no parameter, which a module would register."""
        value: Tensor = self.v
        return value.view_as(value) if isinstance(value, nn.Parameter) else value

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Return a copy of the value."""
        draw: Tensor = super().rsample(as_size("sample_shape", sample_shape))
        return draw.clone()

    @property
    def mean(self) -> Tensor:
        """The mean, of the value's shape."""
        return self.v if self._mean is None else self._mean

    @property
    def mode(self) -> Tensor:
        """The value itself."""
        value: Tensor = self.v
        return value

    @property
    def variance(self) -> Tensor:
        """The variance of each element, of the value's shape."""
        return torch.zeros_like(self.v) if self._variance is None else self._variance

    @property
    def variance_sum(self) -> Tensor:
        """The sum of the variances, ``(*batch_shape,)``."""
        if self._variance is None:
            known: Tensor = self.v.new_zeros(self.batch_shape)
            return known
        return event_sum(self._variance, self.event_dim)

    @property
    def is_known(self) -> bool:
        """Whether the value is known, not drawn."""
        return self._variance is None

    def expand(self, batch_shape: Any, _instance: Any = None) -> "PointMass":
        """Return this point with a larger batch shape, sharing memory."""
        shape = as_expanded(batch_shape, self.batch_shape) + self.event_shape
        moments = (None if m is None else m.expand(shape) for m in (self._mean, self._variance))
        mean, variance = moments
        return PointMass(self.v.expand(shape), self.event_dim, mean, variance, validate_args=False)


@register_kl(PointMass, PyroDistribution)  # Pyro has a rule for Delta and this class
def _kl_point_mass(q: PointMass, p: Any) -> Tensor:
    """The expected negative log density, in closed form or at a known value."""
    base = base_of(p)
    if isinstance(base, Normal):
        return normal_cross_entropy(q, base)
    if not q.is_known:
        return event_sum(expected_neg_log_prob(q.mean, q.variance, p), q.event_dim)
    nats: Tensor = -p.log_prob(q.v)
    return event_sum(nats, nats.dim() - len(q.batch_shape))


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


@singledispatch
def quantiles(distribution: Any, probs: Tensor) -> Tensor:
    """Return the quantiles of each element by itself.

    Of a transformed distribution they are the transformed quantiles: exact where each element is
    transformed by itself, as onto the positive numbers; otherwise, as onto a simplex, the values that
    belong to the quantiles of the unconstrained elements. Those of K equally likely points are
    interpolated, as by :func:`torch.quantile`.

    Args:
        distribution: A posterior.
        probs: Numbers from 0 to 1, ``(num,)``.

    Returns:
        The quantiles, ``(num, *batch_shape, *event_shape)``.

    Raises:
        NotImplementedError: If there is no rule for this kind of distribution.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.tensor([0.0, 10.0]), torch.tensor([1.0, 2.0]))
        >>> quantiles(q, torch.tensor([0.5, 0.975])).round(decimals=2)
        tensor([[ 0.0000, 10.0000],
                [ 1.9600, 13.9200]])
    """
    raise NotImplementedError(f"There is no rule for the quantiles of {type(distribution)}.")


@quantiles.register
def _(distribution: GaussianWeight, probs: Tensor) -> Tensor:
    return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)


@quantiles.register
def _(distribution: PointMass, probs: Tensor) -> Tensor:
    return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)


@quantiles.register
def _(distribution: TransformedDistribution, probs: Tensor) -> Tensor:
    """Of what a bijection makes of a distribution; it may fall, as onto the negative numbers."""

    def image(probs: Tensor) -> Tensor:
        values = quantiles(distribution.base_dist, probs)
        for transform in distribution.transforms:
            values = transform(values)
        return values

    try:
        _ = [transform.sign for transform in distribution.transforms]
    except NotImplementedError:  # not of each element by itself
        return image(probs)
    ends, wanted = torch.stack([image(probs), image(1 - probs)]), in_front(probs, image(probs)[0])
    return torch.where(wanted < 0.5, ends.amin(0), ends.amax(0))


def normal_quantiles(mean: Tensor, stddev: Tensor, probs: Tensor) -> Tensor:
    """Return quantiles of normals, with the probabilities in front; a point has no tails."""
    at = ndtri(in_front(probs, mean))
    return torch.where(stddev > 0, mean + stddev * at, mean)


def in_front(probs: Tensor, like: Tensor) -> Tensor:
    """Return probabilities with dimensions of size 1 for those of a tensor."""
    return probs.reshape(-1, *(1 for _ in range(like.dim())))
