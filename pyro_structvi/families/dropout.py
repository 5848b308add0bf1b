"""Monte Carlo dropout."""

from dataclasses import dataclass
from typing import ClassVar

from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyro_structvi._checks import Share, Whole
from pyro_structvi.distributions import BernoulliDropout, PointMass
from pyro_structvi.families.family import Family
from pyro_structvi.families.site import LatentSite
from pyro_structvi.families.transformed import bijection_onto, has_bijection


@dataclass(frozen=True)
class Dropout(Family):
    """Weights whose input channels are dropped at random; points for all other sites.

    The parameter is ``loc``, the mean, unconstrained.

    Args:
        rate: The probability with which an input channel is dropped. It is not learned.
        input_dim: Which dimension of the weights counts their input channels. When None that is known of
            layers of torch, of ``Conv1D``, and of weights in no module, ``(out, in, *kernel)``. Where it
            is not, as for the stacked weights of experts, it must be given: ``{"*.experts":
            Dropout(0.1, input_dim=2), "*": Dropout(0.1)}``.

    Raises:
        ValueError: If the rate is not at least 0 and below 1, or when a site's input channels are not
            known.

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
    input_dim: Whole | None = None
    needs: ClassVar[str] = "a continuous site, and `input_dim` where that of a weight is not known"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is continuous, and the input channels of a weight are known."""
        is_known = self.input_dim is not None or site.input_dim is not None
        return has_bijection(site.support) and (is_known or not _has_inputs(site))

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc``."""
        return {"loc": bijection_onto(site.support).inv(loc).clone()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        """Return the weight with dropout, or a point for what has no input channels."""
        loc = parameters["loc"]
        if not _has_inputs(site):
            value = bijection_onto(site.support)(loc)
            return PointMass(value, site.event_dim, validate_args=False)
        input_dim = site.input_dim if self.input_dim is None else self.input_dim
        assert input_dim is not None  # as `fits` has made sure
        groups = site.groups if input_dim == site.input_dim else 1
        return BernoulliDropout(loc, self.rate, input_dim, groups, validate_args=False)


def _has_inputs(site: LatentSite) -> bool:
    """Whether a site is a weight that multiplies inputs."""
    return site.is_real and not site.is_batch and len(site.shape) >= 2 and site.fan_in != 0
