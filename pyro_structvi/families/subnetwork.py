"""A posterior over some of the elements of a net, and points for the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from pyro_structvi._checks import check_mask, check_shape
from pyro_structvi.distributions import PointMass
from pyro_structvi.families.family import Family
from pyro_structvi.families.full_covariance import FullCovariance
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True, eq=False)
class Subnetwork(Family):
    """One posterior over chosen elements of several sites together; the others are points.

    A site has the buffers ``rest``, its values, and ``index``, which elements are chosen; the S
    chosen elements of all sites of this family are one vector, whose parameters are in the guide's
    ``couplings``.

    Args:
        chosen: Which elements, a mask of booleans for each site by name; a site without one has none
            that is chosen. All elements of all sites when None.
        posterior: The family of the vector's posterior.
        train_rest: Whether the other elements are trained along, as point estimates.

    Raises:
        TypeError: If a mask is not a tensor of booleans, or the posterior is not a family of vectors.
        ValueError: When a guide is made: if a mask has not its site's shape, or nothing is chosen.
        MemoryError: When a guide is made, if a full covariance would take too much.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.families import PointEstimate
        >>> from pyro_structvi.guides import StructuredGuide
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> model = Classifier(bayesianize(net, prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"net.2.*": Subnetwork(), "*": PointEstimate()})
        >>> sum(parameter.numel() for parameter in guide.parameters()) == 40 + 27 + 27 * 28 // 2
        True

    References:
        Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato (2021), "Bayesian deep learning
        via subnetwork inference".
    """

    chosen: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    posterior: Family = field(default_factory=FullCovariance)
    train_rest: bool = False
    needs: ClassVar[str] = "a site with real values, in no plate"

    def __post_init__(self) -> None:
        """Check the types; masks' shapes are checked at the sites."""
        super().__post_init__()
        for name, mask in (self.chosen or {}).items():
            check_mask(f"chosen['{name}']", mask)

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of what is not trained."""
        return ("index",) if self.train_rest else ("rest", "index")

    def fits(self, site: LatentSite) -> bool:
        """Whether the site takes every real value."""
        return site.is_real and not site.is_batch

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at ``loc``, where the chosen elements have the standard deviation ``scale``."""
        if self.chosen is None:
            return {"rest": loc.clone(), "index": torch.arange(loc.numel(), device=loc.device)}
        mask = self.chosen.get(site.name, torch.zeros(loc.shape, dtype=torch.bool))
        check_shape(f"chosen['{site.name}']", mask, loc.shape, "that of the site")
        return {"rest": loc.clone(), "index": mask.flatten().nonzero().squeeze(-1).to(loc.device)}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> "PartlyChosen":
        """Return the values, into which the chosen ones are to be put."""
        return PartlyChosen(parameters["rest"], site.event_dim, parameters["index"])


@dataclass(frozen=True)
class ChosenPart:
    """A site's part of the vector of chosen elements: its value, mean and variance, ``(size,)``."""

    value: Tensor
    mean: Tensor
    variance: Tensor


class PartlyChosen(PointMass):
    """The values of a site, of which some are yet to come."""

    def __init__(self, rest: Tensor, event_dim: int, index: Tensor) -> None:
        super().__init__(rest, event_dim, validate_args=False)
        self._index = index

    def given(self, part: ChosenPart) -> PointMass:
        """Return the distribution of the site where the chosen elements are drawn elsewhere."""
        value, mean = (self._put(self.v, chosen) for chosen in (part.value, part.mean))
        variance = self._put(torch.zeros_like(self.v), part.variance)
        return PointMass(value, self.event_dim, mean, variance, validate_args=False)

    def _put(self, values: Tensor, chosen: Tensor) -> Tensor:
        flat: Tensor = values.flatten().scatter(0, self._index, chosen)
        return flat.reshape(values.shape)
