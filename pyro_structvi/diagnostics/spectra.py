"""Singular values of posterior means and standard deviations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_structvi._checks import checked
from pyro_structvi.posterior.element_scores import marginal_variances
from pyro_structvi.sites.structured import StructuredGuide


@dataclass(frozen=True)
class Spectrum:
    """Singular values of the posterior of one weight, as a matrix ``(out, rest)``.

    Attributes:
        mean: Singular values of the matrix of means, descending, ``(min(out, rest),)``.
        scale: Singular values of the matrix of standard deviations.
        mean_share: Square of each singular value of the means over the sum of squares, the explained
            variance; zeros for a matrix of zeros.
        scale_share: The same for the standard deviations.
    """

    mean: Tensor
    scale: Tensor
    mean_share: Tensor
    scale_share: Tensor


@checked
def spectra(guide: StructuredGuide) -> dict[str, Spectrum]:
    """Return the singular values of the posterior of each weight with at least two dimensions.

    A weight ``(out, *rest)`` is flattened to a matrix ``(out, prod(rest))``.

    How to read it: ``scale_share.cumsum(0)[k - 1]`` bounds the share of the standard deviations that a
    k-tied posterior of rank k can keep. If it is near 1 for a small k, :func:`compress_scales` or a
    ``KTiedGuide(model, rank=k)`` loses little. Means usually need many ranks, and standard deviations
    few, since these are positive and one rank holds their common level.

    Args:
        guide: A fitted guide.

    Returns:
        The spectra by site, in float64, without constrained sites.

    Raises:
        ValueError: If no site has a matrix or filters.

    Example:
        >>> from pyro_structvi import Classifier, KTiedGuide, bayesianize
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(2, 6, 3), torch.nn.Flatten())
        >>> guide = KTiedGuide(Classifier(bayesianize(net, prior=1.0), num_data=10), rank=1)
        >>> spectrum = spectra(guide)["net.0.weight"]
        >>> spectrum.scale.shape, round(float(spectrum.scale_share[0]), 4)
        (torch.Size([6]), 1.0)

    References:
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 2.3 and appendix C
        of the submission to ICLR 2020.
    """
    means, variances = guide.median(), marginal_variances(guide)
    found = {}
    for name, variance in variances.items():
        if variance.dim() >= 2:
            matrices = (each.double().flatten(1) for each in (means[name], variance.sqrt()))
            values = [torch.linalg.svdvals(matrix) for matrix in matrices]
            found[name] = Spectrum(*values, *map(_share, values))
    if not found:
        raise ValueError(
            "`guide` must have a weight with at least two dimensions, but has the shapes "
            f"{[tuple(variance.shape) for variance in variances.values()]}."
        )
    return found


def _share(singular_values: Tensor) -> Tensor:
    squares = (singular_values / singular_values.max().clamp_min(1e-300)).square()
    return squares / squares.sum().clamp_min(1)
