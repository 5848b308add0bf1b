"""A posterior over chosen elements, with points for all other elements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import check_mask, check_shape, checked
from pyro_structvi.sites.family import Family, GuideOptions
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.site_posterior import Coupling, SharedPosterior, SitePosterior, couple
from pyro_structvi.sites.structured import StructuredGuide, check_one_posterior
from pyro_structvi.structures.full_covariance import FullCovariance
from pyro_structvi.weights.site_distributions import PointMass
from pyro_structvi.weights.weight_distribution import GaussianWeight


@dataclass(frozen=True, eq=False)
class Subnetwork(Family):
    """A joint posterior over chosen elements of several sites; all other elements are points.

    A site has the buffers ``rest``, its values, and ``index``, the indices of chosen elements. The
    chosen elements of all sites are one vector, with parameters in the guide's ``couplings``.

    Args:
        chosen: A boolean mask for each site by name, as for :class:`SubnetworkGuide`; all elements of
            all sites when None.
        posterior: The family of the vector's posterior.
        train_rest: Whether to train all other elements as point estimates.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> from pyro_structvi.families import PointEstimate
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> model = Classifier(bayesianize(net, prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"net.2.*": Subnetwork(), "*": PointEstimate()})
        >>> sum(parameter.numel() for parameter in guide.parameters()) == 40 + 27 + 27 * 28 // 2
        True
    """

    chosen: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    posterior: Family = field(default_factory=FullCovariance)
    train_rest: bool = False
    needs: ClassVar[str] = "a site with real values, in no plate"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, mask in (self.chosen or {}).items():
            check_mask(f"chosen['{name}']", mask)

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("index",) if self.train_rest else ("rest", "index")

    def fits(self, site: LatentSite) -> bool:
        return site.is_real and not site.is_batch

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        if self.chosen is None:
            return {"rest": loc.clone(), "index": torch.arange(loc.numel(), device=loc.device)}
        mask = self.chosen.get(site.name)
        if mask is None:  # under `estimate_memory` new masks would have no values
            return {"rest": loc.clone(), "index": loc.new_empty(0, dtype=torch.long)}
        check_shape(f"chosen['{site.name}']", mask, loc.shape, "that of the site")
        return {"rest": loc.clone(), "index": mask.flatten().nonzero().squeeze(-1).to(loc.device)}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> "PartlyChosen":
        return PartlyChosen(parameters["rest"], site.event_dim, parameters["index"])


class PartlyChosen(PointMass):
    """The values of a site without its chosen elements."""

    def __init__(self, rest: Tensor, event_dim: int, index: Tensor) -> None:
        super().__init__(rest, event_dim, validate_args=False)
        self._index = index

    def condition(self, part: Tensor) -> PointMass:
        """Return the distribution given value, mean and variance of chosen elements, ``(3, size)``."""
        value, mean = (self._put(self.v, chosen) for chosen in part[:2])
        variance = self._put(torch.zeros_like(self.v), part[2])
        return PointMass(value, self.event_dim, mean, variance, validate_args=False)

    def _put(self, values: Tensor, chosen: Tensor) -> Tensor:
        flat: Tensor = values.flatten().scatter(0, self._index, chosen)
        return flat.reshape(values.shape)


class JointSubnetwork(SharedPosterior):
    """The joint posterior of chosen elements; its auxiliary site counts the entropy."""

    def __init__(
        self, family: Family, posteriors: Mapping[str, SitePosterior], scale: float
    ) -> None:
        starts = {
            name: post.value("rest").flatten()[post.value("index")]
            for name, post in posteriors.items()
        }
        loc = torch.cat(list(starts.values()))
        if not len(loc):
            raise ValueError(
                f"`chosen` must choose at least one element of the sites {list(starts)}, but no "
                "mask of theirs does."
            )
        site = LatentSite(f"subnetwork of {next(iter(starts))}", loc.shape, 1, constraints.real)
        start = family.init(site, loc, scale) if family.fits(site) else {}
        if not (start and isinstance(family.distribution(site, **start), GaussianWeight)):
            raise TypeError(
                f"The chosen elements need a normal posterior of one vector, but got {family}. Use "
                "`FullCovariance()`, `LowRank(rank=2)` or `MeanField()`."
            )
        super().__init__(posteriors, SitePosterior(family, site, start))
        self.sizes = {name: len(start) for name, start in starts.items()}

    @property
    def coupled(self) -> tuple[str, ...]:
        return tuple(name for name, size in self.sizes.items() if size)

    @property
    def by_marginals(self) -> tuple[str, ...]:
        return self.coupled

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found late may join: only without chosen elements."""
        return not any(len(post.value("index")) for post in posteriors.values())

    def split(self, value: Tensor, q: Any) -> dict[str, Any]:
        parts = torch.stack([value, q.mean, q.variance]).split([*self.sizes.values()], -1)
        return dict(zip(self.sizes, parts, strict=True))


@couple.register
def _(family: Subnetwork, posteriors: Mapping[str, SitePosterior], scale: float) -> Coupling | None:
    return JointSubnetwork(family.posterior, posteriors, scale)


class SubnetworkGuide(StructuredGuide):
    """A full covariance over chosen elements of all layers, and points for all other elements.

    Constrained sites, such as a noise scale, and sites in plates have mean field.

    Fit a :class:`MAPGuide`, choose elements with :mod:`pyro_structvi.element_scores`, and fit this
    guide around it. To choose whole layers, use :class:`StructuredGuide` with the family
    :class:`~pyro_structvi.families.Subnetwork` for their pattern.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        chosen: A boolean mask for each site by name; no element is chosen at a site without a mask.
        center: The guide whose medians are the initial values, and the values of points.
        posterior: The family of the vector of chosen elements; a :class:`FullCovariance` when None.
        train_rest: Whether to train all other elements as point estimates.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        TypeError: If a mask is not a tensor of booleans.
        ValueError: If a mask fits no site, nothing is chosen, or a center and ``init_loc_fn`` are given.
        MemoryError: If the full covariance would take too much.

    Example:
        >>> from pyro_structvi import Classifier, MAPGuide, bayesianize, element_scores
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> center = MAPGuide(model)  # to be fitted
        >>> x = torch.randn(10, 4)
        >>> chosen = element_scores.largest(element_scores.laplace_variances(model, center, x), size=6)
        >>> guide = SubnetworkGuide(model, chosen, center)
        >>> sum(parameter.numel() for parameter in guide.parameters())
        27

    References:
        Daxberger, Nalisnick, Allingham, Antoran and Hernandez-Lobato (2021), "Bayesian deep learning
        via subnetwork inference", ICML.
    """

    @checked
    def __init__(
        self,
        model: Callable[..., Any],
        chosen: Mapping[str, Tensor],
        center: StructuredGuide | None = None,
        *,
        posterior: Family | None = None,
        train_rest: bool = False,
        **options: Unpack[GuideOptions],
    ) -> None:
        if center is not None:
            if options.get("init_loc_fn") is not None:
                raise ValueError("Give one of `center` and `init_loc_fn`, but got both.")
            check_one_posterior(center, "center")
            values = center.median()
            if not chosen.keys() <= values.keys():
                raise ValueError(
                    f"`center` must be a guide of the same model, but of the sites of `chosen`, "
                    f"{list(chosen)}, it has only {[name for name in chosen if name in values]}."
                )
            options["init_loc_fn"] = lambda site: values.get(site["name"])
        family = Subnetwork(chosen, posterior or FullCovariance(), train_rest)
        super().__init__(model, {"*": family}, **options)

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        super().initialize(*args, **kwargs)
        family, own = self.families["*"], self._own_posteriors()
        assert isinstance(family, Subnetwork)
        served = {each.site.name for each in own if isinstance(each.family, Subnetwork)}
        missing = [name for name in family.chosen or {} if name not in served]
        if missing:
            self._initialized = False  # so that the next call is this error, too
            raise ValueError(
                f"`chosen` has masks for {missing}, but of the model's sites {self.site_names} only "
                "those with real values, in no plate, can be chosen from."
            )
