"""The variational parameters of one site."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn

from pyro_structvi._torch import is_recording
from pyro_structvi.sites.family import Family, as_tensor, check_options
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto


class SitePosterior(nn.Module):
    """The variational parameters of one site; calling it gives the posterior as it stands now.

    Its state holds the family's options beside the parameters, since these mean nothing without.

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
        """Leave the family as it is: a state with another one was refused before anything changed."""

    def value(self, name: str) -> Tensor:
        """Return a parameter or constant as it stands, masks and parametrizations applied."""
        value: Tensor = getattr(self, name)
        return value

    def release(self, name: str) -> Tensor:
        """Give up a parameter and return its value."""
        self._names = tuple(own for own in self._names if own != name)
        value = self.value(name).detach()
        delattr(self, name)
        return value

    def put(self, name: str, value: Tensor) -> None:
        """Take a parameter more, at this value."""
        self._names = (*self._names, name)
        self.register_parameter(name, nn.Parameter(value.detach()))

    def replace_family(self, family: Family, **constants: Tensor) -> None:
        """Go over to a family with the same parameters, and some constants beside them."""
        self.family = family
        self._names = tuple(dict.fromkeys([*self._names, *constants]))
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self) -> TorchDistribution:
        """Return the posterior at the current parameters.

        It is made anew at every call, unless gradients are off, the family ``keeps_factors`` and no
        parameter differs from the copies that the last one was made of.
        """
        values = {name: self.value(name) for name in self._names}
        if torch.is_grad_enabled() or is_recording() or not self.family.keeps_factors:
            self._kept = None
            return self.family.distribution(self.site, **values)
        if self._kept is None or not _are_equal(self._kept[0], values):
            copies = {name: value.clone() for name, value in values.items()}
            self._kept = copies, self.family.distribution(self.site, **copies)
        return self._kept[1]

    def of_examples(self, plates: Mapping[str, Any]) -> TorchDistribution:
        """Return the posterior of the examples that plates have drawn, of their rows of parameters.

        Args:
            plates: Pyro's plates by name, those around the site among them.
        """
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
        """Return the state without what can be computed again, and without gradients of masks."""
        state = {**super().__getstate__(), "_kept": None}
        masked = {name: state[name].detach() for name in self._names if name in state}
        return state | masked

    def extra_repr(self) -> str:
        """Say which sites have a posterior of which family."""
        return f"{' and '.join(self.site.names)}: {self.family}"


def _are_equal(kept: dict[str, Tensor], values: dict[str, Tensor]) -> bool:
    return all(
        kept[name].dtype == value.dtype
        and kept[name].device == value.device
        and torch.equal(kept[name], value)
        for name, value in values.items()
    )
