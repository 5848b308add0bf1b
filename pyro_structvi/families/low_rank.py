"""Low rank plus diagonal, the ELRG-VI and ELRG-D-VI of Tomczak et al. (2020)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from pyro_structvi._checks import Count, Positive
from pyro_structvi.distributions import LowRankNormal
from pyro_structvi.families.family import MatrixFamily
from pyro_structvi.families.site import LatentSite

Diagonal = Literal["constant", "isotropic", "full"]

CONSTANT = 0.1  # what a constant diagonal has of 1 / sqrt(fan-in), and at most of the prior


@dataclass(frozen=True)
class LowRank(MatrixFamily):
    """Normals with K directions in which all elements of a site vary together, and a diagonal.

    Parameters are ``loc``, ``factors (K, *shape)`` and, where it is learned, ``log_scale`` of the
    diagonal part: one number, or ``(*shape)``.

    Args:
        rank: The number K of directions, at least 1.
        diagonal: The diagonal part of the covariance: "constant" is ELRG-VI, "full" ELRG-D-VI;
            "isotropic" learns one variance for each site.
        diagonal_variance: The variance of a constant diagonal; that of the paper is exp(-10). When None,
            its standard deviation is 0.1 over the root of the fan-in, so that outputs have little noise,
            and at most a tenth of the prior's.
        alpha: What multiplies the low-rank part; 1/K when None, as in the paper.
        join_bias: Whether a layer's bias is a further column of its weight.

    Raises:
        ValueError: If an option is out of its range.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": LowRank(rank=2, join_bias=True)})
        >>> guide["net.weight"]().covariance_matrix.shape
        torch.Size([15, 15])

    References:
        Tomczak, Swaroop and Turner (2020), "Efficient low rank Gaussian variational inference for
        neural networks", section 3. The constant exp(-10) is that of the authors' code.
    """

    rank: Count = 1
    diagonal: Diagonal = "constant"
    diagonal_variance: Positive | None = None
    alpha: Positive | None = None
    delayed: ClassVar[tuple[str, ...]] = ("factors",)
    needs: ClassVar[str] = "a real site of at least one dimension, in no plate"

    @property
    def moves_in_own_coordinates(self) -> bool:  # type: ignore[override]
        """Not with a constant diagonal, which leaves ``rank`` directions; docs/design.md has figures."""
        return self.diagonal != "constant"

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        """The name of the constant diagonal's scale, where it follows from the site."""
        follows = self.diagonal == "constant" and self.diagonal_variance is None
        return ("diagonal_scale",) if follows else ()

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.diagonal_variance is not None and self.diagonal != "constant":
            raise ValueError(
                f'`diagonal_variance` is for diagonal="constant"; with "{self.diagonal}" it is '
                "learned. Leave it out, and set its start by the guide's `init_scale`."
            )

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a weight or a vector."""
        return site.is_real and not site.is_batch and len(site.shape) >= 1

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start so that elements have the variance ``scale^2`` on average.

        A learned diagonal takes half of it, the directions the other half; a constant one is added.
        """
        constant = self.diagonal == "constant"
        part = scale if constant else scale / math.sqrt(2)
        spread = part / math.sqrt(self.rank * self._alpha)
        parameters = {
            "loc": loc.clone(),
            "factors": spread * loc.new_empty(self.rank, *loc.shape).normal_(),
        }
        if self.constants:
            parameters["diagonal_scale"] = loc.new_tensor(_constant_scale(site))
        if not constant:
            shape = loc.shape if self.diagonal == "full" else ()
            parameters["log_scale"] = loc.new_full(shape, math.log(part))
        return parameters

    def distribution(self, site: LatentSite, **parameters: Tensor) -> LowRankNormal:
        """Return the low-rank Normal."""
        loc = parameters["loc"]
        if self.constants:
            scale = parameters["diagonal_scale"]
        elif self.diagonal_variance is not None:
            scale = loc.new_full((), math.sqrt(self.diagonal_variance))
        else:
            scale = parameters["log_scale"].exp()
        return LowRankNormal(
            loc, parameters["factors"], scale, self._alpha, site.event_dim, validate_args=False
        )

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return a tenth of the site's unit for the directions, which are deviations from the mean."""
        return 0.1 * site.unit if name == "factors" else super().unit(site, name, value)

    @property
    def _alpha(self) -> float:
        return 1 / self.rank if self.alpha is None else self.alpha


def _constant_scale(site: LatentSite) -> float:
    """Return the standard deviation of a constant diagonal that nobody has chosen."""
    inputs = site.fan_in or site.shape[1:].numel()
    most = math.inf if site.prior_scale is None else site.prior_scale
    return CONSTANT * min(1 / math.sqrt(inputs), most)
