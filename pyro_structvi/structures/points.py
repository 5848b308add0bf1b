"""Point estimates."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from torch import Tensor

from pyro_structvi.sites.family import Family, GuideOptions
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto, has_bijection
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.site_distributions import PointMass


@dataclass(frozen=True)
class PointEstimate(Family):
    """A point; the parameter is ``loc (*shape)``, unconstrained.

    The loss is the negative log posterior density of the site's value, or with ``kl_weight=0`` the
    negative log likelihood.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*": PointEstimate()})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        15
    """

    needs: ClassVar[str] = "a continuous site, with a bijection onto its support"

    def fits(self, site: LatentSite) -> bool:
        return has_bijection(site.support)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        return {"loc": bijection_onto(site.support).inv(loc).clone()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PointMass:
        value = bijection_onto(site.support)(parameters["loc"])
        return PointMass(value, site.event_dim, validate_args=False)


class MAPGuide(StructuredGuide):
    """A maximum a posteriori estimate of every site; with ``kl_weight=0`` maximum likelihood.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MAPGuide(model).parameters())
        160400
    """

    def __init__(self, model: Callable[..., Any], **options: Unpack[GuideOptions]) -> None:
        super().__init__(model, {"*": PointEstimate()}, **options)


def are_points(posteriors: Iterable[SitePosterior]) -> bool:
    """Whether all posteriors are points, and there is one."""
    families = [posterior.family for posterior in posteriors]
    return bool(families) and all(isinstance(each, PointEstimate) for each in families)
