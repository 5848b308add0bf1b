"""Weights given what the net makes of global inducing points."""

import math
from dataclasses import dataclass

from torch import Tensor

from pyro_structvi.distributions.given_inputs import NormalGivenInputs
from pyro_structvi.families.family import MatrixFamily
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class GlobalInducing(MatrixFamily):
    r"""A regression of each layer on what it meets at the inducing points, for outputs that are learned.

    Parameters are ``target (rows, out)`` and ``log_precision (rows,)``, a row for each inducing point,
    or for each of its positions in a convolution, and ``log_scale (in,)``, the standard deviations
    without any row: rows (out + 1) + in numbers. Layers of two to four outputs, such as a mean and a
    noise scale, have ``log_precision (rows, out)``. They belong to the points, so that
    :class:`~pyro_structvi.guides.GlobalInducingGuide` makes them.

    Args:
        join_bias: Whether a layer's bias is a further column of its weight.

    References:
        Ober and Aitchison (2021), "Global inducing point variational posteriors for Bayesian neural
        networks and deep Gaussian processes".
    """

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Return the weight that the targets are made of, and the prior's standard deviations.

        Raises:
            NotImplementedError: If there are shapes only, as for ``estimate_memory``.
        """
        if loc.is_meta:
            raise NotImplementedError(
                "How many parameters a GlobalInducingGuide has depends on what the net makes of its "
                "points. Make the guide with its points, and count `guide.parameters()`."
            )
        log_scale = loc.new_full((loc[0].numel(),), math.log(_scale(site, site.prior_scale)))
        if site.bias is not None:
            log_scale[-1] = math.log(_scale(site, site.bias.prior_scale))
        return {"loc": loc.clone(), "log_scale": log_scale}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> NormalGivenInputs:
        """Return the distribution of the weight given its inputs."""
        if "target" not in parameters:
            raise RuntimeError(
                f"The weight at site '{site.name}' has no posterior before the inducing points are "
                "known. Train the guide, or call `guide.initialize(...)` with the model's arguments."
            )
        return NormalGivenInputs(site.shape, **parameters)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return 1 for outputs, to which a layer's prior gives about that scale."""
        return 1.0 if name == "target" else super().unit(site, name, value)


def _scale(site: LatentSite, prior_scale: float | None) -> float:
    """Return the prior's standard deviation, or where it has none the unit of the site."""
    return site.unit if prior_scale is None else prior_scale
