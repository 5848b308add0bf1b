"""A guide with a family for each latent site of a model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._checks import Positive, Program, checked, shape_text
from pyro_structvi._pyro import unwrapped
from pyro_structvi.linalg.matrices import no_autocast
from pyro_structvi.nn.random_module import sample_every_site
from pyro_structvi.sites.autoguide import (
    OwningAutoGuide,
    check_not_given,
    declare_parameters,
    warn_of_local_latents,
)
from pyro_structvi.sites.family import (
    CreatePlates,
    Family,
    InitLocFn,
    check_patterns,
    choose_families,
    joins_with,
)
from pyro_structvi.sites.finding import (
    FoundSite,
    find_declared_sites,
    find_sites_by_running,
    separate_randomness,
    start_of,
    warn_of_other_rows,
    warn_of_unused,
)
from pyro_structvi.sites.gradient_paths import trace_gradient_paths
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.report import report
from pyro_structvi.sites.sampled_net import sample_functions, sampled, to_net
from pyro_structvi.sites.site_posterior import (
    Coupling,
    JointPosterior,
    SitePosterior,
    check_no_plates_around,
    couple_families,
    joint_name,
    module_key,
)
from pyro_structvi.weights.site_role import LocalReparam, SiteUse


class StructuredGuide(OwningAutoGuide):
    r"""A guide with one posterior for each latent site, of the family chosen for it.

    Sites that a module tree declares (``PyroSample``) have parameters from the start. Sites sampled in a
    function or in a plate are found by a run of the model, at the first call or by :meth:`initialize`;
    this run also counts the uses of each weight. The guide owns its parameters, which Pyro's param store
    only mirrors: save and restore a guide by ``state_dict``.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        families: A family for each pattern of site names, such as ``{"net.0.*": KTied(2), "*":
            MeanField()}``, with wildcards as in a shell. A site has the first matching family that
            fits it. Other vectors, scalars and constrained sites have mean field.
        init_scale: The initial standard deviation of each element, in the unconstrained space.
        init_relative_scale: The initial standard deviation of each element, as a share of the prior's;
            a joined bias has that of its weight. Sites whose prior has no known standard deviation, and
            constrained ones, start with ``init_scale``; so do all sites when None.
        init_loc_fn: The initial center of a posterior, a function of a site as in
            :mod:`pyro.infer.autoguide.initialization`. By default, and if it returns None, a weight
            starts at its value in the net given to ``bayesianize``, any other weight at a sample of
            N(0, 2 / in), a vector or scalar at the median of the prior.
        local_reparam: True to sample, under ``StructuredELBO``, the outputs of linear layers and
            convolutions; "exact" to do so only if the joint distribution of an example stays exact
            (one position for each example, and as many rows as observed examples); "flipout" for
            "exact" with flipout for independent elements elsewhere; False to always sample weights.
        create_plates: As for Pyro's guides, a function of the model's arguments that returns a
            ``pyro.plate`` or several, for data that are subsampled outside of the model.

    Raises:
        ValueError: If a weight has no family, if the family of an exact site name does not fit, or if
            a site is discrete.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.families import KTied, MeanField
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = Classifier(bayesianize(net, prior=1.0), num_data=20)
        >>> guide = StructuredGuide(model, {"net.0.weight": MeanField(), "*": KTied(rank=2)})
        >>> guide["net.2.weight"].family
        KTied(rank=2)
    """

    runs_together = False  # whether several draws of the model have run in one pass

    @checked
    def __init__(
        self,
        model: Program,
        families: Mapping[str, Family],
        *,
        init_scale: Positive = 0.01,
        init_relative_scale: Positive | None = None,
        init_loc_fn: InitLocFn | None = None,
        local_reparam: LocalReparam = True,
        create_plates: CreatePlates | None = None,
    ) -> None:
        super().__init__(model, init_loc_fn, create_plates)
        self.families = dict(families)
        self.init_scale = init_scale
        self.init_relative_scale = init_relative_scale
        self.local_reparam = local_reparam
        self.posteriors = nn.ModuleDict()
        self.couplings = nn.ModuleDict()
        self._uses: dict[str, SiteUse] = {}
        self._weight_of: dict[str, str] = {}  # of each joined bias
        self._initialized = False
        with separate_randomness():
            self._adopt(find_declared_sites(model))
        sample_every_site(unwrapped(model))

    @property
    def num_members(self) -> int:
        """The number of members of a mixture; 1 for other guides."""
        return 1

    @property
    def is_of_points(self) -> bool:
        """Whether this is a mixture of points, so that one draw of each member is all of it."""
        return False

    @property
    def num_points(self) -> int:
        """The number of points with equal weights that a mixture consists of; 0 for other guides."""
        return 0

    @property
    def site_names(self) -> list[str]:
        """The latent sites, in the order of sampling."""
        return list(self._uses)

    @property
    def uses(self) -> Mapping[str, SiteUse]:
        """The uses of each site in the runs by :meth:`initialize`."""
        return self._uses

    @property
    def local_site_names(self) -> list[str]:
        """The sites of single examples, in a plate with observations."""
        return [name for name in self._uses if self[name].site.is_local]

    @property
    def is_initialized(self) -> bool:
        """Whether the model was run, so that all sites and their uses are known."""
        return self._initialized

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Run the model once to find its sites, and to count the uses of each.

        The first call of the guide does this. Call it before to load a state dict into the guide of a
        function, or again with arguments that take another path through the model: the number of uses is
        the maximum over all runs. The arguments are the model's, observations included, for two examples
        or more; their values do not matter.

        Raises:
            ValueError: If a pattern matches no site, a weight has no family, or there is no latent site.
            RuntimeError: If the guide was unpickled and has no model.
        """
        model = self.needed_model
        with separate_randomness(), self.warning_of_new_parameters():
            found = find_sites_by_running(model, args, kwargs)
            check_patterns(found, self.families)
            given = {name: each.given_plate for name, each in found.items() if each.given_plate}
            self._check_given_plates(given)
            self._start_over_if_other(found)
            self._adopt(found)
        # In the order of execution, as Pyro's mean-field ELBO expects.
        self._uses = {name: self._uses[name] for name in [*found, *self._uses]}
        joint = [*self._weight_of.items(), *(each.by_marginals for each in self._couplings())]
        with separate_randomness():
            trace_gradient_paths(model, args, kwargs, self._uses, joint)
        self._initialized = True
        warn_of_unused(found, self._uses)
        warn_of_other_rows(self._uses)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site, and return the values by name.

        Under ``Predictive`` the model samples local sites of other examples than in training, with a
        :class:`LocalLatentWarning`.
        """
        joint = self.begin_pass(*args, **kwargs)
        local = [name for name in self.local_site_names if not self[name].site.is_subsampled]
        new: list[str] = []
        if local and self.model is not None and poutine.get_mask() is False:
            with separate_randomness():
                found = find_sites_by_running(self.model, args, kwargs)
            shapes = {name: each.site.shape for name, each in found.items()}
            new = [name for name in local if self[name].site.shape != shapes.get(name)]
            warn_of_local_latents([name for name in local if name not in new], new)
        return joint.program(left_out=new)(*args, **kwargs)

    def begin_pass(self, *args: Any, **kwargs: Any) -> JointPosterior:
        """Declare the parameters to Pyro, and return the distributions for all passes of a step."""
        if not self._initialized and poutine.get_mask() is not False:
            self.initialize(*args, **kwargs)
        couplings = [*self._couplings()]
        check_no_plates_around(each.sites for each in couplings)
        joined = (each.site for each in self._own_posteriors() if each.site.bias is not None)
        check_not_given([
            *((each.sites, each.drawn_at) for each in couplings),
            *((site.names, joint_name(site)) for site in joined),
        ])
        declare_parameters(self)
        return self.joint_posterior()

    def joint_posterior(self, *args: Any, **kwargs: Any) -> JointPosterior:
        """Return the current distributions; arguments of the model initialize the guide if needed."""
        if not self._initialized and (args or kwargs):
            self.initialize(*args, **kwargs)
        if not self._uses:
            raise RuntimeError(
                "The guide knows no latent site yet, since its model declares none before it runs. "
                "Train it, or call `guide.initialize(...)` with the model's arguments, first."
            )
        own, couplings = [*self._own_posteriors()], [*self._couplings()]
        return JointPosterior(own, couplings, self._uses, self.make_plates, self.are_plates_given)

    def all_posteriors(self) -> Iterator[SitePosterior]:
        """Return the posteriors of sites and couplings, which hold the parameters."""
        return (module for module in self.modules() if isinstance(module, SitePosterior))

    @checked
    def draw(self, local: bool = False, number: int | None = None) -> dict[str, Tensor]:
        """Draw all sites once, as ordinary tensors by site; needs no data.

        Args:
            local: Whether to draw the sites of single examples too.
            number: The number of the draw, which selects a member of an ensemble.
        """
        return self.joint_posterior().draw(local, number)

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior median of each site; the mean for an ensemble or dropout.

        It is the mean also of a distribution of Pyro without ``icdf``, and the image of its base's
        median of a transformed distribution.

        A guide that is not initialized needs the model's arguments.
        """
        return self.joint_posterior(*args, **kwargs).median()

    @torch.no_grad()
    @checked
    def quantiles(
        self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Return posterior quantiles of each element of each site, ``(num, *shape)``, by site.

        It takes the further arguments of :meth:`median`.

        Raises:
            ValueError: If a number is not from 0 to 1.
            NotImplementedError: If there is no closed form, as for inducing weights that layers share.

        Example:
            >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
            >>> guide = KTiedGuide(Regressor(bayesianize(nn.Linear(3, 2)), 10, 0.1), rank=1)
            >>> guide.quantiles([0.05, 0.5, 0.95])["net.weight"].shape
            torch.Size([3, 2, 3])
        """
        return self.joint_posterior(*args, **kwargs).quantiles(quantiles)

    report, to_net, sampled, sample_functions = report, to_net, sampled, sample_functions

    def options(self) -> dict[str, Any]:
        """Return the arguments of :meth:`from_options` that make an equal guide."""
        if self.create_plates is not None:
            raise TypeError(
                "`guide` must have no `create_plates`, a function that no file holds. Save "
                "`guide.state_dict()` by `torch.save`."
            )
        own = {each.site.name: each for each in self._own_posteriors()}
        chosen = choose_families({name: each.site for name, each in own.items()}, self.families)
        changed = {name: own[name].family for name in own if own[name].family != chosen[name]}
        return {
            "families": self.families,
            "changed": changed,
            "init_scale": float(self.init_scale),
            "init_relative_scale": self.init_relative_scale,
            "local_reparam": self.local_reparam,
        }

    @classmethod
    def from_options(cls, model: Any, changed: Mapping[str, Family], **options: Any) -> Self:
        """Return a guide of this class for another model, with the families that pruning changed."""
        guide = cls.__new__(cls)
        owner: Any = next(base for base in cls.__mro__ if "options" in vars(base))
        owner.__init__(guide, model, **options)
        guide.change_families(changed)
        return guide

    def change_families(self, changed: Mapping[str, Family]) -> None:
        """Give sites families with the same parameters, as pruning does."""
        for name, family in changed.items():
            posterior = self[name]
            scale = self._scale_at(posterior.site)
            start = family.init(posterior.site, posterior.value("loc").detach(), scale)
            posterior.replace_family(family, **{key: start[key] for key in family.constants})

    def __getitem__(self, name: str) -> SitePosterior:
        """Return the posterior of a site; of a joined bias, the posterior of its weight."""
        name = self._weight_of.get(name, name)
        if name not in self:
            raise KeyError(f"'{name}' is none of the sites {list(self._uses)}.")
        posterior = self.posteriors[module_key(name)]
        assert isinstance(posterior, SitePosterior)
        return posterior

    def _scale_at(self, site: LatentSite) -> float:
        """Return the initial standard deviation of a site's elements."""
        share, prior = self.init_relative_scale, site.prior_scale if site.is_real else None
        return self.init_scale if share is None or prior is None else share * prior

    def _own_posteriors(self) -> Iterator[SitePosterior]:
        return (self[name] for name in self._uses if name not in self._weight_of)

    def _couplings(self) -> Iterator[Coupling]:
        return (each for each in self.couplings.values() if isinstance(each, Coupling))

    def _start_over_if_other(self, found: dict[str, FoundSite]) -> None:
        """Drop all posteriors if the first run has a site in a plate, or of another shape."""
        shapes = [pair for own in self._own_posteriors() for pair in own.site.shapes.items()]
        sites = {name: item.site for name, item in found.items()}
        if not self._initialized and any(
            sites[name].plates or sites[name].shape != shape
            for name, shape in shapes
            if name in sites
        ):
            self.posteriors.clear()
            self.couplings.clear()
            self._uses, self._weight_of = {}, {}

    @torch.no_grad()
    @no_autocast()  # of the first step; starting values keep their precision
    def _adopt(self, found: dict[str, FoundSite]) -> None:
        """Make posteriors for new sites; nothing changes on an error."""
        for bias, weight in self._weight_of.items():
            if (bias in found) != (weight in found):
                raise ValueError(
                    f"The weight '{weight}' is joined with its bias '{bias}', but the model samples "
                    "only one of them. Give it a family with `join_bias=False`."
                )
        sites = {name: item.site for name, item in found.items()}
        new = {name: site for name, site in sites.items() if name not in self}
        chosen = choose_families(new, self.families)
        weight_of = self._weight_of | {
            bias: name
            for name, family in chosen.items()
            if (bias := joins_with(sites[name], family, sites, self.families)) in chosen
        }
        for bias, weight in weight_of.items():
            if weight in sites:
                sites[weight] = sites[weight].join_bias(sites.pop(bias))
        for name in (name for name in sites if name in self):
            known, shape = self[name].site.shape, sites[name].shape
            if shape != known:
                raise ValueError(
                    f"The site '{name}' has shape {shape_text(shape)} with these arguments, and its "
                    f"posterior {shape_text(known)}. Make a new guide for other sizes."
                )
        made: dict[str, SitePosterior] = {}
        for name, family in chosen.items():
            if name in sites:
                locs = [start_of(found[each], self.init_loc_fn) for each in sites[name].names]
                # A bias is the last column of its weight.
                loc = torch.cat([locs[0].flatten(1), locs[1][:, None]], 1) if locs[1:] else locs[0]
                start = family.init(sites[name], loc, self._scale_at(sites[name]))
                made[module_key(name)] = SitePosterior(family, sites[name], start)
        self.posteriors.update(made)
        self._weight_of = weight_of
        for name, site in sites.items():
            self[name].site = site  # a run adds information to the declaration
        for name, item in found.items():
            item.use.local_reparam = self.local_reparam
            self._uses[name] = item.use.after(self._uses.get(name))
        couple_families(self._own_posteriors(), self.couplings, self._scale_at)

    def __contains__(self, name: str) -> bool:
        return module_key(self._weight_of.get(name, name)) in self.posteriors


def check_one_posterior(guide: StructuredGuide, name: str = "guide") -> None:
    """Raise a ``ValueError`` for a mixture, whose members have separate posteriors."""
    if hasattr(guide, "members"):  # also of a single one
        raise ValueError(
            f"`{name}` must have one posterior for each site, but is a mixture. Call this for each of "
            f"its members, such as `{name}.members[0]`."
        )
