"""The contract of a family: which variational parameters, with which start, make a posterior."""

from dataclasses import dataclass, field, replace
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
class JoinedBias:
    """The bias that is a weight's last column.

    Attributes:
        name: The bias's site in the model.
        weight_shape: The weight's own shape there, ``(out, *rest)``.
    """

    name: str
    weight_shape: torch.Size


@dataclass(frozen=True)
class LatentSite:
    """What a family may know of a latent site. It holds no data and no distribution.

    A weight that is joined with its bias is one site here, ``(out, in + 1)``, and two in the model.

    Attributes:
        name: The site's name in the model.
        shape: Shape of a value, batch dimensions of plates in front.
        event_dim: How many trailing dimensions are one event. Dimensions in no plate count as event,
            whether or not the model wrote ``to_event``.
        support: Where values lie.
        plates: The vectorized plates around it; none for a single value.
        is_local: Whether one of the plates holds observations too: the site then belongs to the
            examples it was trained on, and is left to the model when predicting others.
        bias: The bias joined to this weight, if one is.
    """

    name: str
    shape: torch.Size
    event_dim: int
    support: Any
    plates: tuple[Plate, ...] = ()
    is_local: bool = False
    bias: JoinedBias | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The sites of the model that a value of this one is for."""
        return (self.name,) if self.bias is None else (self.name, self.bias.name)

    def join_bias(self, bias: "LatentSite") -> "LatentSite":
        """Return the site of this weight with a bias ``(out,)`` as its last column."""
        shape = torch.Size([self.shape[0], self.shape[1:].numel() + 1])
        return replace(self, shape=shape, event_dim=2, bias=JoinedBias(bias.name, self.shape))

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """Return the values of the model's sites, by name."""
        if self.bias is None:
            return {self.name: value}
        weight = value[..., :-1].reshape(*value.shape[:-2], *self.bias.weight_shape)
        return {self.name: weight, self.bias.name: value[..., -1]}

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


@dataclass(frozen=True)
class MatrixFamily(Family):
    """A family for weights seen as matrices ``(out, in)``, which can take their biases along.

    Args:
        join_bias: Whether the bias of a layer becomes a further column of its weight, so that the
            posterior is one over both. The bias of ``<name>weight<suffix>`` is the site
            ``<name>bias<suffix>`` of shape ``(out,)``; a weight without one stays by itself.
    """

    join_bias: bool = field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if not isinstance(self.join_bias, bool):
            raise TypeError(f"`join_bias` must be True or False, but got {self.join_bias!r}.")


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
        return f"{' and '.join(self.site.names)}: {self.family}"
