"""The contract of a family: which variational parameters, with which start, make a posterior."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi._checks import check_boolean

if TYPE_CHECKING:
    from pyro_structvi.families.coupling import Coupling


_STEP: ContextVar[dict["SitePosterior", TorchDistribution]] = ContextVar("one_step")


@contextmanager
def one_step() -> Iterator[None]:
    """Keep what is factored in this block for all passes in it, with one backward pass for all.

    The parameters may not change in the block.
    """
    token = _STEP.set({})
    try:
        yield
    finally:
        _STEP.reset(token)


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
        prior_scale: As for :class:`LatentSite`.
    """

    name: str
    weight_shape: torch.Size
    prior_scale: float | None = None


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
        prior_scale: The standard deviation of the prior, root mean square over elements; None where
            there is none or it is infinite.
    """

    name: str
    shape: torch.Size
    event_dim: int
    support: Any
    plates: tuple[Plate, ...] = ()
    is_local: bool = False
    bias: JoinedBias | None = None
    prior_scale: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The sites of the model that a value of this one is for."""
        return (self.name,) if self.bias is None else (self.name, self.bias.name)

    def join_bias(self, bias: "LatentSite") -> "LatentSite":
        """Return the site of this weight with a bias ``(out,)`` as its last column."""
        shape = torch.Size([self.shape[0], self.shape[1:].numel() + 1])
        joined = JoinedBias(bias.name, self.shape, bias.prior_scale)
        return replace(self, shape=shape, event_dim=2, bias=joined)

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """Return the values of the model's sites, by name."""
        if self.bias is None:
            return {self.name: value}
        weight, bias = value.split([value.shape[-1] - 1, 1], -1)
        # Torch would return the gradient of rows that lie apart transposed, and turn it, slowly.
        weight = weight.contiguous().view(*value.shape[:-2], *self.bias.weight_shape)
        return {self.name: weight, self.bias.name: bias.squeeze(-1)}

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

    Attributes:
        needs: In words, what sites it serves.
        constants: The names among those of ``init`` that are not trained.
        keeps_factors: Whether its distributions factor matrices, which are then kept between calls
            without gradients for as long as the parameters stay equal.
    """

    needs: ClassVar[str]
    constants: ClassVar[tuple[str, ...]] = ()
    keeps_factors: ClassVar[bool] = False

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

    def couple(self, posteriors: "Mapping[str, SitePosterior]", scale: float) -> "Coupling | None":
        """Return what sites of this family draw together, or None where they are independent.

        Args:
            posteriors: The posteriors of all sites of this family, by site.
            scale: The standard deviation of each element at the start.
        """
        return None

    def members(self, posterior: "SitePosterior") -> Tensor:
        """Return what each member ``(K, *shape)`` of an ensemble has at a site."""
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
        check_boolean("join_bias", self.join_bias)


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
        self._names = tuple(parameters)
        self._kept: tuple[dict[str, Tensor], TorchDistribution] | None = None
        for name, value in parameters.items():
            if name in family.constants:
                self.register_buffer(name, value.detach())
            else:
                self.register_parameter(name, nn.Parameter(value.detach()))

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

    def replace_family(self, family: Family, **constants: Tensor) -> None:
        """Go over to a family with the same parameters, and some constants beside them."""
        self.family = family
        self._names = tuple(dict.fromkeys([*self._names, *constants]))
        for name, value in constants.items():
            self.register_buffer(name, value)

    def forward(self) -> TorchDistribution:
        """Return the posterior at the current parameters."""
        values = {name: self.value(name) for name in self._names}
        if torch.is_grad_enabled() or not self.family.keeps_factors:
            self._kept = None
            step = _STEP.get({}) if self.family.keeps_factors else {}
            if self not in step:
                step[self] = self.family.distribution(self.site, **values)
            return step[self]
        if self._kept is None or not _are_equal(self._kept[0], values):
            copies = {name: value.clone() for name, value in values.items()}
            self._kept = copies, self.family.distribution(self.site, **copies)
        return self._kept[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what can be computed again, and without gradients of masks."""
        state = {**super().__getstate__(), "_kept": None}
        masked = {name: state[name].detach() for name in self._names if name in state}
        return state | masked

    def extra_repr(self) -> str:
        """Say what posterior stands at which site."""
        return f"{' and '.join(self.site.names)}: {self.family}"


def _are_equal(kept: dict[str, Tensor], values: dict[str, Tensor]) -> bool:
    return all(
        kept[name].dtype == value.dtype
        and kept[name].device == value.device
        and torch.equal(kept[name], value)
        for name, value in values.items()
    )
