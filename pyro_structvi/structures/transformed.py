"""Mean field in the unconstrained space of a site."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.distributions import TransformedDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from torch import Tensor
from torch.distributions import (
    ComposeTransform,
    Distribution,
    Independent,
    kl_divergence,
    register_kl,
)

from pyro_structvi.linalg.matrices import event_sum
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.sites.family import DEFAULTS, Family
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto, has_bijection
from pyro_structvi.structures.mean_field import MeanFieldNormal

# Exact for polynomials of degree 63 in the normal; of exp(z), to 1e-12 up to a scale of 1.
_NODES = 32


class TransformedNormal(TransformedDistribution):
    r"""Independent normals pushed onto the support of a site by a bijection f.

    Against a prior p with independent elements, where f acts on each element alone,

    .. math:: \mathrm{KL} = \mathrm{E}_z[-\log p(f(z)) - \log |f'(z)|] - \mathrm{H}[z],

    computed by Gauss-Hermite quadrature with 32 nodes. For a log-normal posterior it is exact to
    rounding with log-normal, half-normal and gamma priors; with a half-Cauchy, the error is below
    1e-5 nats up to a scale of 2 of the logarithm. Other priors have no closed form.

    Example:
        >>> from pyro.distributions import HalfNormal
        >>> from torch.distributions import ExpTransform, kl_divergence
        >>> q = TransformedNormal(MeanFieldNormal(torch.zeros(3), 0.1), [ExpTransform()])
        >>> kl_divergence(q, HalfNormal(torch.ones(3)).to_event(1)).shape
        torch.Size([])
    """

    def at(self, nodes: Tensor) -> Tensor:
        """Return the values ``(count, *shape)`` at standard normal nodes ``(count,)``."""
        normal = self.base_dist
        value = normal.mean + normal.stddev * nodes.reshape(-1, *(1 for _ in normal.mean.shape))
        found: Tensor = ComposeTransform(self.transforms)(value)
        return found


@register_kl(TransformedNormal, torch.distributions.TransformedDistribution)
@register_kl(TransformedNormal, Distribution)
def _kl_by_quadrature(q: TransformedNormal, p: Any) -> Tensor:
    """KL to a prior with independent elements."""
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
    z, transform = normal.mean + normal.stddev * nodes, ComposeTransform(q.transforms)
    value = transform(z)
    log_derivative = transform.log_abs_det_jacobian(z, value)
    expected = (weights * (element.log_prob(value) + log_derivative)).sum(0)
    entropy = normal.stddev.log() + 0.5 * math.log(2 * math.pi * math.e)
    return event_sum(-expected - entropy, len(q.event_shape))


@dataclass(frozen=True)
class TransformedMeanField(Family):
    """Independent normals pushed onto the site's support; log-normals for a positive site.

    The KL to a prior with independent elements is computed by quadrature, exactly for a log-normal
    prior; :class:`~pyro_structvi.StructuredELBO` samples the KL to other priors.

    Example:
        >>> from pyro_structvi.guides import StructuredGuide
        >>> import pyro
        >>> model = lambda: pyro.sample("noise", pyro.distributions.HalfNormal(1.0))
        >>> guide = StructuredGuide(model, {})
        >>> guide.initialize()
        >>> bool(guide.draw()["noise"] > 0)
        True
    """

    needs: ClassVar[str] = "a continuous site, with a bijection onto its support"

    def fits(self, site: LatentSite) -> bool:
        return has_bijection(site.support)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        unconstrained = bijection_onto(site.support).inv(loc).clone()
        log_scale = torch.full_like(unconstrained, scale).log()
        return {"loc": unconstrained, "log_scale": log_scale}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> Any:
        loc, scale = parameters["loc"], parameters["log_scale"].exp()
        plates = len(site.shape) - site.event_dim
        base = MeanFieldNormal(loc, scale, loc.dim() - plates, validate_args=False)
        return TransformedNormal(base, [bijection_onto(site.support)], validate_args=False)


# After mean field, which has precedence for real sites.
DEFAULTS.append(TransformedMeanField())
