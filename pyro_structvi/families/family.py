"""The contract of a family: which variational parameters, with which start, make a posterior."""

from dataclasses import dataclass, field
from typing import ClassVar

from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyro_structvi._checks import check_fields
from pyro_structvi.families.cholesky_parameters import unit_of_lower
from pyro_structvi.families.site import LatentSite


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
        delayed: The names of parameters that an optimizer had better move slowly at first, since they
            fit the others as these are: ``warm_up`` of :class:`~pyro_structvi.infer.StructuredAdam`.
        moves_in_own_coordinates: Whether means gain by a move along the correlations, where there are
            any: ``posterior_lr`` of :class:`~pyro_structvi.infer.StructuredAdam`.
    """

    needs: ClassVar[str]
    constants: ClassVar[tuple[str, ...]] = ()
    keeps_factors: ClassVar[bool] = False
    delayed: ClassVar[tuple[str, ...]] = ()
    moves_in_own_coordinates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the options against their annotations."""
        check_fields(self)

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
            Tensors that nobody else holds. Of a site in plates each ends with the dimensions of the
            plates and of an unconstrained event, so that a subsample can take its rows.
        """
        raise NotImplementedError

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        """Return the posterior that the unconstrained parameters stand for."""
        raise NotImplementedError

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the size of a change of a parameter that matters, in which an optimizer steps.

        Unless a family says otherwise: 1 for a logarithm, ``log_...``; by the length of their rows for
        entries of a Cholesky factor, ``...lower``; and for others, which are then values of the site,
        the site's own.

        Args:
            site: The site.
            name: The parameter's name.
            value: The parameter.
        """
        if name.endswith("lower"):
            return unit_of_lower(value)
        return 1.0 if "log_" in name else site.unit


@dataclass(frozen=True)
class MatrixFamily(Family):
    """A family for weights seen as matrices ``(out, in)``, which can take their biases along.

    Args:
        join_bias: Whether the bias of a layer becomes a further column of its weight, so that the
            posterior is one over both. The bias of ``<name>weight<suffix>`` is the site
            ``<name>bias<suffix>`` of shape ``(out,)``; a weight without one stays by itself.
    """

    join_bias: bool = field(default=False, kw_only=True, repr=False)
    needs: ClassVar[str] = "a real weight of at least two dimensions, (out, *rest)"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a weight matrix, or can be seen as one."""
        return site.is_real and not site.is_batch and len(site.shape) >= 2
