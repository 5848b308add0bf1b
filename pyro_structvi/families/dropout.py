"""Monte Carlo dropout."""

from dataclasses import dataclass
from typing import ClassVar

from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyro_structvi._checks import Share
from pyro_structvi.distributions import BernoulliDropout, PointMass
from pyro_structvi.families.family import Family
from pyro_structvi.families.site import LatentSite
from pyro_structvi.families.transformed import bijection_onto


@dataclass(frozen=True)
class Dropout(Family):
    """Weights whose input channels are dropped at random; points for all other sites.

    The parameter is ``loc``, the mean, unconstrained.

    Args:
        rate: The probability with which an input channel is dropped. It is not learned.

    Raises:
        ValueError: If the rate is not at least 0 and below 1.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*": Dropout(rate=0.5)})
        >>> len(guide.draw()["net.weight"].unique()) <= 13
        True

    References:
        Gal and Ghahramani (2016), "Dropout as a Bayesian approximation".
    """

    rate: Share = 0.1
    needs: ClassVar[str] = "a continuous site"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is continuous."""
        return not site.support.is_discrete

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc``."""
        return {"loc": bijection_onto(site.support).inv(loc).clone()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        """Return the weight with dropout, or a point for what has no input channels."""
        loc = parameters["loc"]
        if site.is_real and not site.plates and len(site.shape) >= 2:
            return BernoulliDropout(loc, self.rate, validate_args=False)
        return PointMass(bijection_onto(site.support)(loc), site.event_dim, validate_args=False)
