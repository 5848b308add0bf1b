"""The contract of a family: which variational parameters, with which start, make a posterior."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions import constraints


@dataclass(frozen=True)
class Plate:
    """A vectorized plate around a site: its name, size and dimension."""

    name: str
    size: int
    dim: int


@dataclass(frozen=True)
class LatentSite:
    """What a family may know of a latent site. It holds no data and no distribution.

    Attributes:
        name: The site's name in the model.
        shape: Shape of a value, batch dimensions of plates in front.
        event_dim: How many trailing dimensions are one event. Dimensions in no plate count as event,
            whether or not the model wrote ``to_event``.
        support: Where values lie.
        plates: The vectorized plates around it; none for a single value.
        is_local: Whether one of the plates holds observations too: the site then belongs to the
            examples it was trained on, and is left to the model when predicting others.
    """

    name: str
    shape: torch.Size
    event_dim: int
    support: Any
    plates: tuple[Plate, ...] = ()
    is_local: bool = False

    @property
    def is_real(self) -> bool:
        """Whether every real value is allowed."""
        support = self.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        return support is constraints.real or isinstance(support, type(constraints.real))


@dataclass(frozen=True)
class Family:
    """A kind of posterior for one site, with its options; the parameters live in a SitePosterior.

    A family defines ``init`` and ``distribution``, in this order, and narrows ``fits`` where it
    cannot serve every site. See "Write your own family" in the documentation.
    """

    needs: ClassVar[str]

    def fits(self, site: LatentSite) -> bool:
        """Whether this family can serve the site; ``needs`` says in words what it takes."""
        raise NotImplementedError

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Return the starting values of the unconstrained parameters, by name.

        Args:
            site: The site.
            loc: Where the posterior shall be centred, a value of the site.
            scale: Its standard deviation per (unconstrained) element.

        Returns:
            Tensors that nobody else holds.
        """
        raise NotImplementedError

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        """Return the posterior that the unconstrained parameters stand for."""
        raise NotImplementedError


class SitePosterior(nn.Module):
    """The variational parameters of one site; calling it gives the posterior as it stands now.

    Args:
        family: The kind of posterior.
        site: The site.
        parameters: Starting values of the unconstrained parameters.

    Example:
        >>> from pyro_structvi.families import KTied
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
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.detach()))

    def forward(self) -> TorchDistribution:
        """Return the posterior at the current parameters."""
        parameters = {name: value for name, value in self._parameters.items() if value is not None}
        return self.family.distribution(self.site, **parameters)

    def extra_repr(self) -> str:
        """Say what posterior stands at which site."""
        return f"{self.site.name}: {self.family}"
