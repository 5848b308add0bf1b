"""The variational parameters of a site, and couplings of sites."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import singledispatch
from typing import Any, Literal

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn

from pyro_structvi._pyro import inside_plate
from pyro_structvi._torch import inside_transform, is_recording
from pyro_structvi.sites.family import FactoredFamily, Family, as_tensor, check_options
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.weights.site_distributions import Auxiliary
from pyro_structvi.weights.site_role import SiteRole


class SitePosterior(nn.Module):
    """The variational parameters of one site; a call returns its distribution.

    The state dict also holds the options of the family, which define the meaning of the parameters.

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
        >>> sorted(name for name, _ in posterior.named_parameters())
        ['loc', 'log_column_scale', 'log_row_scale']
        >>> posterior().event_shape
        torch.Size([2, 3])
    """

    def __init__(self, family: Family, site: LatentSite, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.family = family
        self.site = site
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
        value: Tensor = getattr(self, name)
        return value

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
        """Return the distribution of the examples that plates select, by name."""
        site = self.site
        unconstrained = bijection_onto(site.support).inverse_shape(site.shape)
        event_dim = len(unconstrained) - (len(site.shape) - site.event_dim)
        with ExitStack() as stack:
            for plate in site.plates:
                stack.enter_context(plates[plate.name])
            values = {
                name: pyro.subsample(self.value(name), event_dim=event_dim) for name in self._names
            }
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
    """Return the name of a site as a key of ``nn.ModuleDict``, without dots or names of attributes."""
    key = name.replace("/", "//").replace(".", "/")
    return f"{key}/" if hasattr(nn.ModuleDict, key) or key == "training" else key


How = Literal["sample", "draw", "mean", "marginals"]


class Coupling(nn.Module):
    """A value that several sites of a guide share, sampled once for each pass of the model.

    ``sample``, ``draw``, ``mean`` and ``marginals`` return, by site, the value that its distribution is
    conditioned on, such as inducing weights ``(M_out, M_in)`` or a member of an ensemble. Their
    arguments are the distributions at the current parameters, by site, and the number of the pass,
    which selects a member of an ensemble; None for any.

    Args:
        sites: The names of the sites.
    """

    def __init__(self, sites: Iterable[str]) -> None:
        super().__init__()
        self.sites = tuple(sites)

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

    def auxiliary(self, q: Any) -> Auxiliary:
        """Return the auxiliary distribution of the guide, with its prior."""
        return Auxiliary(q)

    def split(self, value: Tensor, q: Any) -> dict[str, Any]:
        """Return the part of each site."""
        raise NotImplementedError

    def sample(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw at an auxiliary sample site."""
        name, infer = self.posterior.site.name, SiteRole(coupled=self.coupled, is_auxiliary=True)
        value = pyro.sample(name, self.auxiliary(at[name]), infer=infer.as_infer())
        return self.split(value, at[name])

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Draw as ordinary tensors."""
        q = at[self.posterior.site.name]
        return self.split(q.rsample(), q)

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the parts of the mean."""
        q = at[self.posterior.site.name]
        return self.split(q.mean, q)

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        """Return the parts of the mean, which include variances."""
        return self.mean(at, number)


@singledispatch
def couple(
    family: Family, posteriors: Mapping[str, SitePosterior], scale: float
) -> Coupling | None:
    """Return the coupling of the sites of a family, or None for independent sites.

    Families with a coupling register a function by ``couple.register``. ``scale`` is the initial
    standard deviation of each element.
    """
    return None


def couple_families(
    posteriors: Iterable[SitePosterior], known: nn.ModuleDict, scale: float
) -> None:
    """Add missing couplings, with the key of their first site."""
    groups: dict[Family, dict[str, SitePosterior]] = {}
    for posterior in posteriors:
        groups.setdefault(posterior.family, {})[posterior.site.name] = posterior
    for family, own in groups.items():
        couplings = (each for each in known.values() if isinstance(each, Coupling))
        coupling = next((each for each in couplings if own.keys() & set(each.sites)), None)
        if coupling is None:
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
