"""Independent normals pushed onto a support, such as a log-normal, and their KL by quadrature."""

import math
from typing import Any

import torch
from pyro.distributions import TransformedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent, kl_divergence, register_kl

from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.linalg.shapes import event_sum

_NODES = (
    32  # exact for polynomials of degree 63 in the normal; of exp(z), to 1e-12 up to a scale of 1
)


class TransformedNormal(TransformedDistribution):
    r"""Independent normals pushed onto the support of a site by a bijection f.

    Against a prior p with independent elements, where f acts on each element alone,

    .. math:: \mathrm{KL} = \mathrm{E}_z[-\log p(f(z)) - \log |f'(z)|] - \mathrm{H}[z],

    one-dimensional expectations under the normals z, by Gauss-Hermite quadrature with 32 nodes. For a
    log-normal posterior they are exact to rounding against log-normal, half-normal and gamma priors; the
    error against a half-Cauchy is below 1e-5 nats up to a scale of 2 of the logarithm. Other priors have
    no KL here.

    Args:
        base_dist: The normals, an independent weight with its elements as event dimensions.
        transforms: The bijection, as a list.

    Example:
        >>> from pyro.distributions import HalfNormal
        >>> from torch.distributions import ExpTransform, kl_divergence
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> normal = MeanFieldNormal(torch.zeros(3), torch.tensor(0.1))
        >>> q = TransformedNormal(normal, [ExpTransform()])
        >>> kl_divergence(q, HalfNormal(torch.ones(3)).to_event(1)).shape
        torch.Size([])
    """

    def at(self, nodes: Tensor) -> Tensor:
        """Return the values ``(count, *shape)`` at numbers of the standard normal, ``(count,)``."""
        normal = self.base_dist
        value = normal.mean + normal.stddev * nodes.reshape(-1, *(1 for _ in normal.mean.shape))
        for transform in self.transforms:
            value = transform(value)
        found: Tensor = value
        return found


@register_kl(TransformedNormal, torch.distributions.TransformedDistribution)
@register_kl(TransformedNormal, Distribution)
def _kl_by_quadrature(q: TransformedNormal, p: Any) -> Tensor:
    """KL to a prior with independent elements.

    Raises:
        NotImplementedError: If elements of the prior, or of the bijection, depend on each other.
    """
    if isinstance(p, torch.distributions.TransformedDistribution) and q.transforms == p.transforms:
        return kl_divergence(q.base_dist, p.base_dist)
    element = p
    while isinstance(element, (Independent, ExpandedDistribution)):
        element = element.base_dist
    is_of_elements = all(transform.codomain.event_dim == 0 for transform in q.transforms)
    if element.event_shape or not is_of_elements or p.event_shape != q.event_shape:
        raise NotImplementedError
    normal = q.base_dist
    nodes, weights = (
        part.reshape(-1, *[1] * normal.mean.dim()) for part in gauss_hermite(_NODES, normal.mean)
    )
    value = normal.mean + normal.stddev * nodes
    log_derivative = torch.zeros_like(value)
    for transform in q.transforms:
        before, value = value, transform(value)
        log_derivative = log_derivative + transform.log_abs_det_jacobian(before, value)
    expected = (weights * (element.log_prob(value) + log_derivative)).sum(0)
    entropy = normal.stddev.log() + 0.5 * math.log(2 * math.pi * math.e)
    return event_sum(-expected - entropy, len(q.event_shape))
