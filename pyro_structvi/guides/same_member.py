"""The member of an ensemble, the same in each layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_structvi.distributions import InducingNormal
from pyro_structvi.families import SitePosterior
from pyro_structvi.guides.coupling import Coupling


class SameMember(Coupling):
    """The choice of one member for all layers, so that a member of an ensemble is a whole net."""

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        """Whether sites that are found late may join; all may."""
        return True

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Tensor]:
        """Take the member of this number, modulo their size, or choose one."""
        members = self._members(at)
        first = next(iter(members.values()))
        if number is None:
            number = torch.randint(len(first), (), device=first.device)
        if isinstance(number, int):
            return {name: values[number % len(values)] for name, values in members.items()}
        row = number.reshape(1)  # read on the device: the host does not wait
        return {
            name: values.index_select(0, row % len(values)).squeeze(0)
            for name, values in members.items()
        }

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Tensor]:
        """Return the mean over members."""
        return {name: values.mean(0) for name, values in self._members(at).items()}

    def _members(self, at: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what the members ``(K, ...)`` have at each site that the model visits."""
        own = {name: at[name] for name in self.sites if name in at}
        return {
            name: (q.inducing if isinstance(q, InducingNormal) else q).members
            for name, q in own.items()
        }
