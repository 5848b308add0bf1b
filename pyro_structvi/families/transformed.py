"""Mean field in the unconstrained space, for sites such as scales and probabilities."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ExpTransform

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.distributions.transformed import TransformedNormal
from pyro_structvi.families.family import Family
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class TransformedMeanField(Family):
    """Independent normals pushed onto the site's support; a log-normal where that is positive.

    The density carries the Jacobian, so every ELBO is unbiased. Against a prior with independent
    elements the KL is computed by quadrature, exactly for a log-normal one; against others
    :class:`~pyro_structvi.StructuredELBO` samples it.

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
        """Whether the site is continuous, with a bijection onto its support."""
        return has_bijection(site.support)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc``, with the same standard deviation for each unconstrained element."""
        unconstrained = bijection_onto(site.support).inv(loc).clone()
        return {
            "loc": unconstrained,
            "log_scale": torch.full_like(unconstrained, scale).log(),
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> Any:
        """Return the transformed normal; batch dimensions are those of the site's plates."""
        loc, scale = parameters["loc"], parameters["log_scale"].exp()
        plates = len(site.shape) - site.event_dim
        base = MeanFieldNormal(loc, scale, loc.dim() - plates, validate_args=False)
        return TransformedNormal(base, [bijection_onto(site.support)], validate_args=False)


def bijection_onto(support: Any) -> Any:
    """Return the map onto the support: exp alone for positive numbers, as in a log-normal."""
    positive = isinstance(support, type(constraints.positive)) and support.lower_bound == 0
    return ExpTransform() if positive else biject_to(support)


def has_bijection(support: Any) -> bool:
    """Whether a support is continuous, with a bijection from the real numbers."""
    if support.is_discrete:
        return False
    try:
        bijection_onto(support)
    except NotImplementedError:
        return False
    return True


def bijection_at(name: str, support: Any) -> Any:
    """Return the map onto the support of a site of a model.

    Args:
        name: The site's name, for the error.
        support: Its support.

    Raises:
        ValueError: If none is registered, as for a sphere.
    """
    try:
        return bijection_onto(support)
    except NotImplementedError as error:
        raise ValueError(
            f"The latent site '{name}' lies on {support}, onto which torch registers no bijection from "
            "the real numbers. Reparametrize it (for a sphere: `poutine.reparam(model, "
            f"config={{'{name}': ProjectedNormalReparam()}})`, from a ProjectedNormal), or hide it by "
            f"`poutine.block(model, hide=['{name}'])` and write a separate guide for it."
        ) from error
