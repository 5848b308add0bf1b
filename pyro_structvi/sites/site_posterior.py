"""The posterior of a site, couplings of sites, and their joint distribution."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, singledispatch
from statistics import geometric_mean
from typing import Any, Literal, TypeVar

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.nn import Parameter

from pyro_structvi._pyro import inside_plate
from pyro_structvi._torch import inside_transform, is_recording, over_draws
from pyro_structvi.nn.random_module import transient_pass
from pyro_structvi.sites.family import FactoredFamily, Family, as_tensor, check_options, check_start
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.weights.lazy import LazySlice, LazyWeight
from pyro_structvi.weights.site_distributions import Auxiliary, PointMass, quantiles
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import dtype_of_levels, in_single
from pyro_structvi.weights.weight_distribution import FactoredWeight


class SitePosterior(nn.Module):
    """The variational parameters of one site; a call returns its distribution.

    The state dict also holds the options of the family.

    Args:
        family: The kind of posterior.
        site: The site.
        parameters: Starting values of the unconstrained parameters.

    Example:
        >>> from pyro_structvi.families import KTied
        >>> from torch.distributions import constraints
        >>> site = LatentSite("weight", torch.Size([2, 3]), 2, constraints.real)
        >>> family = KTied(rank=1)
        >>> posterior = SitePosterior(family, site, family.init(site, torch.zeros(2, 3), 0.01))
        >>> posterior().event_shape
        torch.Size([2, 3])
    """

    def __init__(self, family: Family, site: LatentSite, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.family = family
        self.site = site
        check_start(family, self, parameters)
        self._names = tuple(parameters)
        self._kept: tuple[dict[str, Tensor], TorchDistribution] | None = None
        for name, value in parameters.items():
            if name in family.constants:
                self.register_buffer(name, value.detach())
            else:
                self.register_parameter(name, nn.Parameter(value.detach()))
        self.register_load_state_dict_pre_hook(check_options)

    def get_extra_state(self) -> Tensor:
        """Return the family's options, for the state dict."""
        return as_tensor(self.family)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing, since a state with another family is refused before it is loaded."""

    def value(self, name: str) -> Tensor:
        """Return a parameter or constant, with masks and parametrizations applied."""
        return getattr(self, name)

    def release(self, name: str) -> Tensor:
        """Remove a parameter and return its value."""
        self._names = tuple(own for own in self._names if own != name)
        value = self.value(name).detach()
        delattr(self, name)
        return value

    def put(self, name: str, value: Tensor) -> None:
        """Add a parameter with this value."""
        self._names = (*self._names, name)
        self.register_parameter(name, nn.Parameter(value.detach()))

    def replace_family(self, family: Family, **constants: Tensor) -> None:
        """Change to a family with the same parameters and further constants."""
        self.family = family
        self._names = tuple(dict.fromkeys([*self._names, *constants]))
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self) -> TorchDistribution:
        """Return the posterior at the current parameters.

        Without gradients the distribution of a :class:`FactoredFamily` is reused as long as the
        parameters stay equal.
        """
        values = {name: self.value(name) for name in self._names}
        is_kept = isinstance(self.family, FactoredFamily) and not torch.is_grad_enabled()
        if not is_kept or is_recording() or inside_transform():
            self._kept = None
            return self.family.distribution(self.site, **values)
        if self._kept is None or not all(
            kept.dtype == own.dtype and kept.device == own.device and torch.equal(kept, own)
            for kept, own in ((self._kept[0][name], values[name]) for name in values)
        ):
            copies = {name: value.clone() for name, value in values.items()}
            self._kept = copies, self.family.distribution(self.site, **copies)
        return self._kept[1]

    def of_examples(self, plates: Mapping[str, Any]) -> TorchDistribution:
        """Return the distribution of the examples that plates select, by name, in their order."""
        site = self.site
        unconstrained = bijection_onto(site.support).inverse_shape(site.shape)
        event_dim = len(unconstrained) - (len(site.shape) - site.event_dim)
        values = {name: self.value(name) for name in self._names}
        for plate in site.plates:
            # `pyro.subsample` would ignore the order of all examples.
            dim, indices = plate.dim - event_dim, plates[plate.name].indices
            for name, value in values.items():
                if value.dim() >= -dim and value.shape[dim] != 1:
                    values[name] = value.index_select(dim, indices.to(value.device))
        return self.family.distribution(site, **values)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the reusable distribution and gradients of masks."""
        state = {**super().__getstate__(), "_kept": None}
        masked = {name: state[name].detach() for name in self._names if name in state}
        return state | masked

    def extra_repr(self) -> str:
        """Show the sites and the family."""
        return f"{' and '.join(self.site.names)}: {self.family}"


def module_key(name: str) -> str:
    """Return the name of a site as a key of ``nn.ModuleDict``, without dots or names of attributes.

    Slashes stand for dots, and a tilde begins what is a slash or a tilde, or ends a name.
    """
    key = name.replace("~", "~0").replace("/", "~1").replace(".", "/")
    return f"{key}~" if hasattr(nn.ModuleDict, key) or key == "training" else key


How = Literal["sample", "draw", "mean", "marginals"]


class Coupling(nn.Module):
    """A value that several sites of a guide share, sampled once for each pass of the model.

    ``sample``, ``draw``, ``mean`` and ``marginals`` return, by site, the value that its distribution is
    conditioned on, such as inducing weights ``(M_out, M_in)``. Their arguments are the distributions at
    the current parameters, by site, and the number of the pass, which selects a member of an ensemble;
    None for any.

    Args:
        sites: The names of the sites.
    """

    def __init__(self, sites: Iterable[str]) -> None:
        super().__init__()
        self.sites = tuple(sites)

    @property
    def by_marginals(self) -> tuple[str, ...]:
        """The sites whose KL terms are expectations under marginals of a joint posterior."""
        return ()

    @property
    def drawn_at(self) -> str | None:
        """The name of the auxiliary site of the shared value, or None if it has none."""
        return None

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found later may be added."""
        return False

    def condition(
        self, how: How, at: Mapping[str, Any], number: Tensor | int | None
    ) -> dict[str, Any]:
        """Return the conditional distributions of the sites, given the values of a method, ``how``."""
        values = getattr(self, how)(at, number)
        return {name: at[name].condition(value) for name, value in values.items() if name in at}

    def sample(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Sample in a guide, with a sample site if the value contributes to the KL."""
        return self.draw(at, number)

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw as ordinary tensors."""
        raise NotImplementedError

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the means."""
        raise NotImplementedError

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the values for marginal distributions; none for sites that have them already."""
        return {}


class SharedPosterior(Coupling):
    """One posterior for several sites, at an auxiliary sample site."""

    def __init__(self, sites: Iterable[str], posterior: SitePosterior) -> None:
        super().__init__(sites)
        self.posterior = posterior

    @property
    def coupled(self) -> tuple[str, ...]:
        """The sites whose scale and mask in the model the shared KL takes."""
        return self.sites

    @property
    def drawn_at(self) -> str:
        return self.posterior.site.name

    def auxiliary(self, q: Any) -> Auxiliary:
        """Return the auxiliary distribution of the guide, with its prior."""
        return Auxiliary(q)

    def split(self, value: Tensor, q: Any) -> dict[str, Any]:
        """Return the part of each site."""
        raise NotImplementedError

    def sample(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        name, infer = self.posterior.site.name, SiteRole(coupled=self.coupled, is_auxiliary=True)
        value = pyro.sample(name, self.auxiliary(at[name]), infer=infer.as_infer())
        return self.split(value, at[name])

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        q = at[self.posterior.site.name]
        return self.split(q.rsample(), q)

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        q = at[self.posterior.site.name]
        return self.split(q.mean, q)

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        return self.mean(at, number)  # its parts include variances


@singledispatch
def couple(
    family: Family, posteriors: Mapping[str, SitePosterior], scale: float
) -> Coupling | None:
    """Return the coupling of the sites of a family, or None for independent sites.

    Families with a coupling register theirs. ``scale`` is the standard deviation of each element at the
    start.
    """
    return None


def couple_families(
    posteriors: Iterable[SitePosterior],
    known: nn.ModuleDict,
    scale_at: Callable[[LatentSite], float],
) -> None:
    """Add missing couplings, with the key of their first site, at the mean scale of their sites."""
    groups: dict[Family, dict[str, SitePosterior]] = {}
    for posterior in posteriors:
        groups.setdefault(posterior.family, {})[posterior.site.name] = posterior
    for family, own in groups.items():
        couplings = (each for each in known.values() if isinstance(each, Coupling))
        coupling = next((each for each in couplings if own.keys() & {*each.sites}), None)
        if coupling is None:
            scale = geometric_mean(scale_at(posterior.site) for posterior in own.values())
            made = couple(family, own, scale)
            if made is not None:
                known[module_key(next(iter(own)))] = made
            continue
        late = {name: own[name] for name in own if name not in coupling.sites}
        if late and not coupling.takes(late):
            raise ValueError(
                f"The sites {[*coupling.sites]} are drawn together, and {[*late]} were found only now. "
                "Make the guide from a function, so that it finds all sites in one run, or give these a "
                "separate family."
            )
        coupling.sites += tuple(late)


def check_no_plates_around(names: Iterable[Sequence[str]]) -> None:
    """Raise a ``NotImplementedError`` if sites that share draws are inside plates of particles."""
    sites = [list(each) for each in names]
    if sites and inside_plate():
        raise NotImplementedError(
            f"The sites {sites} are drawn together, once for all particles, and so not inside the "
            "plates of `vectorize_particles=True` or `parallel=True`. Leave these out, or take "
            "`StructuredELBO(vectorize_particles=True)` and `pyro_structvi.predict`."
        )


T = TypeVar("T")


class JointPosterior:
    """The distributions of all sites of a guide at its current parameters.

    Each distribution is made once, so that all samples share its factors. An objective makes a new
    object after the parameters have changed.
    """

    def __init__(
        self,
        posteriors: Sequence[SitePosterior],
        couplings: Sequence[Coupling],
        uses: Mapping[str, SiteUse],
        make_plates: Callable[..., Mapping[str, Any]],
        are_plates_given: bool,
    ) -> None:
        self._posteriors, self._couplings, self._uses = posteriors, couplings, uses
        self._make_plates, self._are_plates_given = make_plates, are_plates_given
        shared = [each.posterior for each in couplings if isinstance(each, SharedPosterior)]
        self._every = (*posteriors, *shared)
        self._at = {each.site.name: each() for each in self._every}
        self._draws_in_turn = False

    def factorize(self) -> None:
        """Compute the factors that samples share, before an objective maps over samples."""
        for distribution in self._at.values():
            if isinstance(distribution, FactoredWeight):
                distribution.factorize()

    def stacked(self, count: int) -> Tensor:
        """Return numbers of samples, to map over by vmap."""
        return torch.arange(count)

    def program(
        self, number: Tensor | int | None = None, left_out: Collection[str] = ()
    ) -> Callable[..., dict[str, Tensor]]:
        """Return a function of the model's arguments that samples every site by ``pyro.sample``.

        The ``number`` of the pass selects a member of a mixture; None for any.
        """

        def sample(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            own = [each for each in self._posteriors if each.site.name not in left_out]
            around = [plate for each in own for plate in each.site.plates]
            plates = self._make_plates(around, args, kwargs)
            at = self._at | {
                each.site.name: each.of_examples(plates)
                for each in own
                if any(
                    self._are_plates_given or plates[plate.name].subsample_size != plate.size
                    for plate in each.site.plates
                )
            }
            values: dict[str, Tensor] = {}
            for site, distribution in self.conditionals("sample", True, number, at):
                if site.name not in left_out:
                    values |= _sample_site(site, distribution, self._uses, plates)
            return values

        return sample

    def draw(self, local: bool = False, number: Tensor | int | None = None) -> dict[str, Tensor]:
        """Draw all sites once, as ordinary tensors; see :meth:`StructuredGuide.draw`."""
        values: dict[str, Tensor] = {}
        for site, distribution in self.conditionals("draw", local, number):
            values |= site.split(distribution.rsample())
        return values

    def draw_many(self, numbers: Sequence[int], local: bool = False) -> dict[str, Tensor]:
        """Draw all sites once for each number, stacked; vectorized if torch supports that."""
        state = [value for own in self._every for value in (*own.parameters(), *own.buffers())]
        if len(numbers) > 1 and not self._draws_in_turn and are_plain(state):
            if not self._couplings:
                values: dict[str, Tensor] = {}
                for site, distribution in self.conditionals("draw", local):
                    values |= site.split(distribution.rsample(torch.Size([len(numbers)])))
                return values
            self.factorize()
            each = torch.tensor(numbers, device=state[0].device)
            draws = in_one_pass(partial(self.draw, local), each)
            if draws is not None:
                return draws
            self._draws_in_turn = True
        return stack_draws([self.draw(local, number) for number in numbers])

    def median(self) -> dict[str, Tensor]:
        """Return the median of each site; see :meth:`StructuredGuide.median`."""
        medians: dict[str, Tensor] = {}
        for site, distribution in self.conditionals("mean", True):
            medians |= site.split(median_of(distribution).clone())
        return medians

    def quantiles(self, probs: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Return quantiles of each site's elements; see :meth:`StructuredGuide.quantiles`."""
        asked = probabilities(probs)
        found: dict[str, Tensor] = {}
        for site, own in self.conditionals("marginals", True):
            like = median_of(distribution := in_single(own))
            levels = asked.to(like.device, dtype_of_levels(asked, like))
            try:
                values = quantiles(distribution, levels).to(like)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"The posterior of the site '{site.name}' has no quantiles in closed form. Take "
                    "those of draws: `guide.draw()`."
                ) from error
            found |= site.split(values)
        return found

    def conditionals(
        self,
        how: How,
        local: bool = False,
        number: Tensor | int | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[LatentSite, Any]]:
        """Yield each site and its distribution conditioned on the values that couplings share."""
        at = self._at if at is None else at
        conditioned: dict[str, Any] = {}
        for coupling in self._couplings:
            conditioned |= coupling.condition(how, at, number)
        for site in (posterior.site for posterior in self._posteriors):
            if local or not site.is_local:
                yield site, conditioned.get(site.name, at[site.name])


def probabilities(probs: Sequence[float] | Tensor) -> Tensor:
    """Return the argument ``quantiles`` in double precision, ``(num,)``."""
    asked = torch.as_tensor(probs, dtype=torch.float64).reshape(-1)
    if not bool(((asked >= 0) & (asked <= 1)).all()):
        raise ValueError(f"`quantiles` must be numbers from 0 to 1, but got {probs}.")
    return asked


def median_of(distribution: Any) -> Tensor:
    """Return the median of each element; the mean without a closed form, images of them under a flow."""
    base = getattr(distribution, "base_dist", None)
    if base is None:
        mean: Tensor = distribution.mean
        try:
            value: Tensor = distribution.icdf(mean.new_full((), 0.5))
        except NotImplementedError:
            return mean
        return value
    value = median_of(base)
    for transform in getattr(distribution, "transforms", ()):
        value = transform(value)
    return value


def are_plain(values: Iterable[Any]) -> bool:
    """Whether no value is a tensor subclass, such as a sharded tensor, which vmap may not support."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return all(type(tensor) in (Tensor, Parameter) for tensor in tensors)


def in_one_pass(
    run: Callable[[Any], T], values: Any, modules: Collection[nn.Module] = ()
) -> T | None:
    """Map a function over stacked samples by vmap, each with separate random numbers; None if it fails.

    Validation is off, since values are not accessible under vmap. Parts of modules stay as they were.
    """
    with warnings.catch_warnings(), pyro.validation_enabled(False):
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            with transient_pass(modules):
                results: T = over_draws(run)(values)
        except Exception:
            return None
    return results


def stack_draws(draws: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return draws by site in one dictionary, ``(len(draws), *shape)`` each."""
    if len(draws) == 1:
        return {name: value.unsqueeze(0) for name, value in draws[0].items()}
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def _sample_site(
    site: LatentSite, distribution: Any, uses: Mapping[str, SiteUse], plates: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Sample a site in a guide; a weight and its bias at an auxiliary site of their joint distribution.

    The two sites of the model are then point masses at slices of the joint sample.
    """
    own = [uses[name] for name in site.names]
    if site.bias is None:
        with ExitStack() as stack:
            for plate in site.plates:
                stack.enter_context(plates[plate.name])
            infer = SiteRole(own[0]).as_infer()
            return {site.name: pyro.sample(site.name, distribution, infer=infer)}
    once, unused = all(use.allows_outputs for use in own), all(use.count == 0 for use in own)
    count = 1 if once else 0 if unused else None
    eager_reason = own[0].eager_reason or own[1].eager_reason
    use = SiteUse(site.name, own[0].local_reparam, count, eager_reason)
    use.is_dependent = any(each.is_dependent for each in own)
    use.is_uncompared = own[0].is_uncompared
    role = SiteRole(use, joins=site.names, is_auxiliary=True)
    joint = pyro.sample(joint_name(site), distribution, infer=role.as_infer())
    shapes = site.shapes
    if isinstance(joint, LazyWeight):
        takes = {name: lambda value, name=name: site.split(value)[name] for name in shapes}
        parts: dict[str, Tensor] = {
            name: LazySlice(joint, shape, takes[name], uses[name]) for name, shape in shapes.items()
        }
    else:
        parts = site.split(joint)
    infer = SiteRole(is_slice=True).as_infer()
    for name, part in parts.items():
        point = PointMass(part, len(shapes[name]), validate_args=False)
        parts[name] = pyro.sample(name, point, infer=infer)
    return parts


def joint_name(site: LatentSite) -> str:
    """Return the name ``<weight>+<bias>`` of a joint site in the trace of the guide."""
    weight, bias = site.names
    return f"{weight}+{bias.rpartition('.')[-1]}"
