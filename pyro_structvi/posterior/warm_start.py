"""Initialization of a posterior from another fitted posterior."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_structvi._checks import Count, Positive, Whole, brief, check_positive, checked
from pyro_structvi.sites.family import Family
from pyro_structvi.sites.parameterization import parameters_of_rows
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.sites.structured import StructuredGuide, check_one_posterior
from pyro_structvi.structures.full_covariance import FullCovariance
from pyro_structvi.structures.k_tied import KTied
from pyro_structvi.structures.mean_field import MeanField, PrunedNormal
from pyro_structvi.weights.weight_distribution import GaussianWeight, noise_columns


@checked
def k_tied_from_mean_field(guide: StructuredGuide, rank: Count = 2) -> StructuredGuide:
    """Return a copy of a fitted mean-field guide with k-tied standard deviations.

    Every weight with the family ``MeanField`` gets ``KTied(rank)`` with the same means and the factors
    of :func:`tie_scales`; other sites, and those with pruned elements, keep their posteriors.
    ``diagnostics.spectra`` suggests a rank. The paper sets negative entries of a truncated singular
    value decomposition to a small constant; positive factors keep the rank, and are the same for rank 1.

    Raises:
        ValueError: If no weight has mean field, or the guide is a mixture.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(40, 30), prior=1.0), num_data=10)
        >>> guide = MeanFieldGuide(model)  # to be fitted
        >>> tied = k_tied_from_mean_field(guide, rank=1)
        >>> [sum(value.numel() for value in each.parameters()) for each in (guide, tied)]
        [2460, 1330]

    References:
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 2.4 and
        appendix A.1 of the submission to ICLR 2020.
    """
    family = KTied(rank, join_bias=False)

    def tie(posterior: SitePosterior) -> SitePosterior | None:
        site, q = posterior.site, posterior()
        is_mean_field = isinstance(posterior.family, MeanField) and not isinstance(q, PrunedNormal)
        if not is_mean_field or not family.fits(site):
            return None
        rows, columns = tie_scales(q.stddev.flatten(1), rank)
        scales = {"log_row_scale": rows.log(), "log_column_scale": columns.log()}
        return SitePosterior(family, site, {"loc": q.mean.clone(), **scales})

    return _replace(guide, tie, "mean field at some weight")


@checked
def full_covariance_from(guide: StructuredGuide, max_memory: Positive = 8.0) -> StructuredGuide:
    """Return a copy of a fitted guide with full covariances and the same Gaussian distributions.

    A full covariance that starts at independent elements needs many more steps. Inducing weights, and
    sites with pruned elements, whose covariances are singular, keep their posteriors. ``max_memory`` is
    as for :class:`~pyro_structvi.families.FullCovariance`, in GiB.

    Raises:
        ValueError: If no site has a Gaussian posterior with another family, or the guide is a mixture.
        MemoryError: If training a site would take more than ``max_memory``.

    Example:
        >>> from pyro_structvi import Classifier, RowwiseGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(3, 2), prior=1.0), num_data=10)
        >>> guide = RowwiseGuide(model)  # to be fitted
        >>> full_covariance_from(guide)["net.weight"]().scale_tril.shape
        torch.Size([8, 8])
    """

    def widen(posterior: SitePosterior) -> SitePosterior | None:
        site, q = posterior.site, posterior()
        family = FullCovariance(max_memory, join_bias=site.bias is not None)
        is_full = isinstance(posterior.family, FullCovariance)
        if is_full or not _has_dense_noise(q) or not family.fits(site):
            return None
        start = family.init(site, q.mean, 1.0)  # checks the memory
        # W = mean + A e and A' = Q R give A A' = R' R, without rounding squares.
        rows = noise_columns(q).flatten(1).double()
        factor = torch.linalg.qr(rows, mode="r").R.mT
        factor = factor * factor.diagonal().sign()
        start |= parameters_of_rows(factor.to(q.mean), q.mean)
        return SitePosterior(family, site, start)

    return _replace(guide, widen, "a Gaussian posterior without a full covariance at some site")


def _has_dense_noise(q: object) -> bool:
    """Whether a distribution is ``mean + A e`` with a regular covariance."""
    if isinstance(q, PrunedNormal) or not isinstance(q, GaussianWeight):
        return False
    return type(q).scale_noise is not GaussianWeight.scale_noise


def _replace(
    guide: StructuredGuide, make: Callable[[SitePosterior], SitePosterior | None], needed: str
) -> StructuredGuide:
    """Return a copy of a guide with new posteriors; ``make`` returns None for sites that stay."""
    check_one_posterior(guide)
    new = copy.deepcopy(guide)
    families: dict[str, Family] = {}
    with torch.no_grad():
        for key, posterior in guide.posteriors.items():
            assert isinstance(posterior, SitePosterior)
            made = make(posterior)
            if made is not None:
                new.posteriors[key] = made
                families[made.site.name] = made.family
    if not families:
        own = {name: guide[name].family for name in guide.site_names}
        raise ValueError(f"`guide` must have {needed}, but has {own}.")
    new.families = families | guide.families | families  # first, and in place of own ones
    return new


@checked
def tie_scales(scale: Tensor, rank: Count, steps: Whole = 500) -> tuple[Tensor, Tensor]:
    """Approximate a positive matrix by a product of positive factors.

    For rank 1 the factors are the leading singular vectors. For a higher rank, multiplicative updates
    start at the absolute values of the singular vectors.

    Args:
        scale: The matrix, ``(out, in)``, positive.
        rank: The number k of columns of each factor, ``(out, k)`` and ``(in, k)``.
        steps: The number of updates.

    Raises:
        ValueError: If a scale is not positive.

    Example:
        >>> rows, columns = tie_scales(torch.tensor([[1.0, 2.0], [2.0, 4.0]]), rank=1)
        >>> bool(torch.allclose(rows @ columns.T, torch.tensor([[1.0, 2.0], [2.0, 4.0]])))
        True

    References:
        Lee and Seung (2001), "Algorithms for non-negative matrix factorization".
    """
    check_positive("scale", scale)
    if scale.dim() != 2 or not scale.numel():
        raise ValueError(f"`scale` must be a matrix (out, in), but got {brief(scale)}.")
    matrix = scale.double()
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    smallest = 1e-3 * (matrix.mean() / rank).sqrt()
    rows, columns = (
        side.new_full((len(side), rank), float(smallest)) for side in (matrix, matrix.mT)
    )
    known = min(rank, len(s))
    rows[:, :known] = (s[:known].sqrt() * u[:, :known].abs()).clamp_min(smallest)
    columns[:, :known] = (s[:known].sqrt() * vh[:known].mT.abs()).clamp_min(smallest)
    for _ in range(steps if rank > 1 else 0):
        rows *= (matrix @ columns) / (rows @ (columns.mT @ columns))
        columns *= (matrix.mT @ rows) / (columns @ (rows.mT @ rows))
    tiny = torch.finfo(scale.dtype).tiny
    return rows.to(scale.dtype).clamp_min(tiny), columns.to(scale.dtype).clamp_min(tiny)
