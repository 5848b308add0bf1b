"""A value with no density around it: a point estimate, or what was drawn at another site."""

from typing import Any

import torch
from pyro.distributions import Delta, Distribution
from torch import Tensor, nn
from torch.distributions import Normal, register_kl

from pyro_structvi._checks import check_finite, check_shape, checked, validates
from pyro_structvi.linalg.matrices import event_sum
from pyro_structvi.weights.arguments import as_expanded, as_size, check_parameters
from pyro_structvi.weights.kl import expected_neg_log_prob, normal_cross_entropy
from pyro_structvi.weights.torch_distributions import base_of


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


@register_kl(PointMass, Distribution)  # Pyro's class, for which it has a rule of Delta's
def _kl_point_mass(q: PointMass, p: Any) -> Tensor:
    """The expected negative log density, in closed form or at a known value."""
    base = base_of(p)
    if isinstance(base, Normal):
        return normal_cross_entropy(q, base)
    if not q.is_known:
        return event_sum(expected_neg_log_prob(q.mean, q.variance, p), q.event_dim)
    nats: Tensor = -p.log_prob(q.v)
    return event_sum(nats, nats.dim() - len(q.batch_shape))
