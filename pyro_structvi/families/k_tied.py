"""The k-tied Normal of Swiatkowski et al. (2020)."""

import math
from dataclasses import dataclass

from torch import Tensor

from pyro_structvi._checks import Count
from pyro_structvi.distributions import KTiedNormal
from pyro_structvi.families.family import MatrixFamily
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class KTied(MatrixFamily):
    """Normals whose standard deviations form a matrix of rank k; out + in numbers for each rank.

    Parameters are ``loc``, ``log_row_scale (out, k)`` and ``log_column_scale (in, k)``.

    Args:
        rank: The k of the paper, at least 1.
        join_bias: Whether a layer's bias is a further column of its weight.

    Raises:
        ValueError: If the rank is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": KTied(rank=1)})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        25

    References:
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 3 and appendix A.2.
    """

    rank: Count = 2

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start both factors at ``(log(scale) - log(k)) / 2`` plus N(0, 0.1^2) against symmetry."""
        start = (math.log(scale) - math.log(self.rank)) / 2
        out, size = loc.shape[0], loc[0].numel()
        return {
            "loc": loc.clone(),
            "log_row_scale": start + 0.1 * loc.new_empty(out, self.rank).normal_(),
            "log_column_scale": start + 0.1 * loc.new_empty(size, self.rank).normal_(),
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> KTiedNormal:
        """Return the k-tied Normal."""
        return KTiedNormal(
            parameters["loc"],
            parameters["log_row_scale"].exp(),
            parameters["log_column_scale"].exp(),
            validate_args=False,
        )
