"""Random weights: moments of what a guide's sites hold."""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi._torch import without_storage
from pyro_structvi.linalg.factorizations import stable_cholesky
from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.maps.calls import Application, Arrangement, Lookup
from pyro_structvi.maps.linear_map import BiasColumnMap, LinearMap
from pyro_structvi.moments.random_tensor import RandomTensor, Settings, moments, settings_of
from pyro_structvi.sites.joint_posterior import JointPosterior
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.ensemble import ensemble_of
from pyro_structvi.structures.full_covariance import FullNormal
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.structures.transformed import TransformedNormal
from pyro_structvi.weights.outputs import meet_channels
from pyro_structvi.weights.site_distributions import PointMass
from pyro_structvi.weights.torch_distributions import base_of
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    IndependentWeight,
    WeightDistribution,
)

Part = Literal["whole", "weight", "bias"]
Sites = Sequence[tuple[LatentSite, Any]]

NODES = 32  # for the moments of what is pushed onto a support


class RandomWeight(RandomTensor):
    """A weight with a structured posterior, or the weight or bias of one that they have together.

    Linear maps ask the distribution for the moments of their outputs. Anything else sees the means and
    variances of its elements, which are formed when they are asked for.

    Args:
        distribution: The distribution.
        settings: How moments are propagated.
        part: What of the distribution this is.
        shape: The shape of that part.

    Attributes:
        applied: What linear maps have formed of it, by how they take it.
    """

    distribution: WeightDistribution
    part: Part
    applied: dict[Any, Any]

    def __new__(
        cls,
        distribution: WeightDistribution,
        settings: Settings,
        part: Part = "whole",
        shape: torch.Size | None = None,
    ) -> Self:
        """Make the tensor that stands for the weight."""
        shape = distribution.event_shape if shape is None else shape
        weight = without_storage(cls, shape, distribution._first_parameter)
        weight.distribution, weight.part, weight.applied = distribution, part, {}
        weight.settings, weight.covariance = settings, None
        return weight

    @property
    def loc(self) -> Tensor:
        """The means."""
        return self._take(self.distribution.mean)

    @property
    def variance(self) -> Tensor:
        """The variances."""
        return self._take(self.distribution.variance)

    def become(self, other: RandomTensor) -> Self:
        """Refuse: the posterior would not know of it."""
        raise NotImplementedError("A random weight that is changed in place has no moments")

    def _take(self, values: Tensor) -> Tensor:
        if self.part == "whole":
            return values
        return values[:, -1] if self.part == "bias" else values[:, :-1].reshape(self.shape)


def member_numbers(guide: StructuredGuide) -> list[int | None]:
    """Return the numbers of an ensemble's members, each of which is a posterior; else one None."""
    ensemble = ensemble_of(guide)
    return [None] if ensemble is None else [*range(ensemble.size)]


def posteriors_of(joint: JointPosterior, number: int | None = None) -> Sites:
    """Return each global site and its distribution by itself, or that of a member of an ensemble."""
    return [*joint.conditionals("marginals" if number is None else "draw", number=number)]


def by_name(sites: Sites) -> dict[str, Any]:
    """Return the distributions by the names of their sites."""
    return {site.name: q for site, q in sites}


def random_values(sites: Sites, settings: Settings) -> dict[str, Tensor]:
    """Return the value of each site: random, or a tensor where it is known.

    Args:
        sites: The sites and their distributions.
        settings: How moments are propagated.
    """
    values: dict[str, Tensor] = {}
    for site, q in sites:
        if isinstance(q, WeightDistribution) and site.bias is not None:
            weight, bias = site.names
            values[weight] = RandomWeight(q, settings, "weight", site.bias.weight_shape)
            values[bias] = RandomWeight(q, settings, "bias", site.shape[:1])
        elif isinstance(q, WeightDistribution) and not q.batch_shape:
            values[site.name] = RandomWeight(q, settings)
        else:
            values |= site.split(_value_of(q, settings))
    return values


def _value_of(q: Any, settings: Settings) -> Tensor:
    base = base_of(q)
    if isinstance(base, PointMass):
        mean: Tensor = q.mean
        return mean
    if not isinstance(base, TransformedNormal):
        return RandomTensor(q.mean, q.variance, settings)
    nodes, weights = gauss_hermite(NODES, base.base_dist.mean)
    values = base.at(nodes)
    mean = torch.einsum("k,k...->...", weights, values)
    variance = torch.einsum("k,k...->...", weights, (values - mean).square())
    return RandomTensor(mean, variance, settings)


LARGEST = 4096  # elements of a weight whose covariance is formed to bring it into another order


def linear_moments(application: Application) -> RandomTensor:
    r"""Return the moments of ``linear_map(x, W) + b``.

    With :math:`E[x] = m`, :math:`\operatorname{Var}(x_j) = v_j`, independent of W and of each other,

    .. math:: \operatorname{Var}(y_i) = m^\top \Sigma_i m + \sum_j (\Sigma_{i,jj} + M_{ij}^2) v_j
            + \operatorname{Var}(b_i),

    where :math:`\Sigma_i` is the covariance of row i of W. It holds for every distribution of W, and is
    exact; what is lost is the covariance between outputs, unless it is kept.

    References:
        Wu, Nowozin, Meeds, Turner, Hernandez-Lobato and Gaunt (2019), "Deterministic variational
        inference for robust Bayesian neural networks", Eq. 5, for independent elements.

    Raises:
        NotImplementedError: If weight and bias have a joint posterior and the weight another order.
    """
    linear_map, x, weight, bias, arrangement = application
    settings = settings_of(x, weight, bias)
    if arrangement is not None and _is_along(weight, bias):
        raise NotImplementedError(
            "A weight and bias with a joint posterior meet a call that takes the weight's dimensions in "
            "another order, for which they have no moments. Use `join_bias=False`."
        )
    m, v = moments(x)
    applied, has_column = _applied(application), _is_along(weight, bias)
    q = None if applied is None else applied.distribution
    matrix = application.matrix_of(weight) if applied is None else applied.matrix
    bias_mean, bias_variance = moments(None if has_column else bias)
    loc = (BiasColumnMap(linear_map) if has_column else linear_map)(m, matrix, bias_mean)

    has_covariance = linear_map.is_dense and loc.dim() == 2
    if settings.full_covariance and has_covariance:
        covariance = _covariance(x, q, matrix, has_column)
        if bias_variance is not None:
            covariance = covariance + _covariance_of(bias)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return RandomTensor(loc, variance, settings, covariance)
    terms = []
    if v is not None:
        factor = matrix.square() if applied is None else applied.factor_of_variances
        terms.append(linear_map(v, factor[..., :-1] if has_column else factor, bias_variance))
    elif bias_variance is not None:
        terms.append(meet_channels(linear_map, bias_variance))
    if q is not None:
        # Independent elements see no more of an input than its squares.
        as_known = (
            m if v is None or not isinstance(q, IndependentWeight) else floored_sqrt(m * m + v)
        )
        terms.append(_variance_at(q, linear_map, as_known, loc, has_column))
    variance = sum(terms[1:], terms[0]).expand(loc.shape)
    found = RandomTensor(loc, variance, settings)

    def form_covariance() -> Tensor:
        """Add what outputs share to their variances: a weight at the mean, and the input's noise."""
        shared = torch.zeros_like(variance).diag_embed()
        if q is not None and not isinstance(q, IndependentWeight):
            shared = shared + _image(q, linear_map, m, has_column).covariance_matrix
        if v is not None:
            shared = shared + _spread_of_input(matrix[:, :-1] if has_column else matrix, v)
        if bias_variance is not None:
            shared = shared + _covariance_of(bias)
        return shared + torch.diag_embed(variance - shared.diagonal(dim1=-2, dim2=-1))

    found.form_covariance = cache(form_covariance) if has_covariance else None
    return found


def _spread_of_input(matrix: Tensor, v: Tensor) -> Tensor:
    """Return ``matrix diag(v) matrix'`` for each row of variances, ``(batch, out, out)``."""
    if len(matrix) > 2 * len(v):
        return (matrix * v.unsqueeze(-2)) @ matrix.mT
    spread: Tensor = F.linear(v, (matrix.unsqueeze(1) * matrix).flatten(0, 1))
    return spread.reshape(len(v), len(matrix), -1)


def lookup_moments(lookup: Lookup) -> RandomTensor:
    """Return the moments of rows that are looked up."""
    weight: RandomTensor = lookup.weight
    loc, variance = (F.embedding(lookup.x, part) for part in (weight.loc, weight.variance))
    return RandomTensor(loc, variance, weight.settings)


def _is_along(weight: Any, bias: Any) -> bool:
    """Whether a weight and its bias come from one joint distribution."""
    both = isinstance(weight, RandomWeight) and isinstance(bias, RandomWeight)
    return both and weight.part == "weight" and bias.distribution is weight.distribution


class _Applied:
    """A random weight as a linear map takes it, with what all mini-batches of a pass share.

    Args:
        distribution: Its distribution.
    """

    def __init__(self, distribution: WeightDistribution) -> None:
        self.distribution = distribution

    @cached_property
    def matrix(self) -> Tensor:
        """The means as the matrix, or the stack of matrices, that the map takes."""
        return self.distribution.as_matrix(self.distribution.loc)

    @cached_property
    def factor_of_variances(self) -> Tensor:
        """What an input's variances are multiplied by, beside the variance at a known input."""
        squares, q = self.matrix.square(), self.distribution
        return squares if isinstance(q, IndependentWeight) else squares + q.as_matrix(q.variance)


def _applied(application: Application) -> _Applied | None:
    """Return the weight as the map takes it; None where it is known."""
    weight, arrangement = application.weight, application.arrangement
    if not isinstance(weight, RandomTensor):
        return None
    if not isinstance(weight, RandomWeight):
        return _Applied(_distribution_of(application))
    key = arrangement, _is_along(weight, application.bias)
    if key not in weight.applied:
        weight.applied[key] = _Applied(_distribution_of(application))
    found: _Applied = weight.applied[key]
    return found


def _distribution_of(application: Application) -> WeightDistribution:
    """Return the distribution of a random weight as the map takes it."""
    weight, arrangement = application.weight, application.arrangement
    if not isinstance(weight, RandomWeight):
        scale = floored_sqrt(weight.variance)
        q: WeightDistribution = MeanFieldNormal(weight.loc, scale, validate_args=False)
    elif weight.part == "whole" or _is_along(weight, application.bias):
        q = weight.distribution
    else:
        q = _dense(weight.distribution, weight)
    if arrangement is None:
        return q
    is_whole = q.event_shape == weight.shape
    found = q.rearranged(arrangement) if is_whole else None
    if found is not None:
        return found
    is_dense = is_whole and isinstance(q, FullNormal)
    return _rearranged(q if is_dense else _dense(q, weight), arrangement)


def _dense(q: WeightDistribution, weight: RandomTensor) -> FullNormal:
    """Return the distribution of a weight, or of the weight without its bias, by its covariance."""
    if q.event_shape.numel() > LARGEST:
        raise NotImplementedError(
            f"A {type(q).__name__} of {q.event_shape.numel()} elements meets a call that takes its "
            "dimensions in another order, or without its bias, for which it has no moments. Use a "
            "structure with independent elements there, `join_bias=False`, or predict with draws."
        )
    covariance = q.covariance_matrix
    if isinstance(weight, RandomWeight) and weight.part == "weight":
        out, size = q.event_shape
        parts = covariance.reshape(out, size, out, size)[:, :-1, :, :-1]
        covariance = parts.reshape(out * (size - 1), -1)
    return FullNormal(weight.loc, _root(covariance), validate_args=False)


def _rearranged(q: FullNormal, arrangement: Arrangement) -> FullNormal:
    """Return a full covariance in another order of the dimensions, of a single weight."""
    if arrangement.stack:
        raise NotImplementedError(
            "A stack of weights that are correlated has no moments. Predict with draws."
        )
    order = arrangement(torch.arange(q.event_shape.numel()).reshape(q.event_shape)).flatten()
    covariance = q.covariance_matrix[order][:, order]
    return FullNormal(arrangement(q.loc), _root(covariance), validate_args=False)


def _root(covariance: Tensor) -> Tensor:
    return stable_cholesky(covariance.double())[0].to(covariance)


def _variance_at(
    q: WeightDistribution, linear_map: LinearMap, x: Tensor, loc: Tensor, has_column: bool
) -> Tensor:
    return q.image_variance(*_joined(q, linear_map, x, has_column), loc)


def _image(q: WeightDistribution, linear_map: LinearMap, m: Tensor, has_column: bool) -> Any:
    return q.image_under(*_joined(q, linear_map, m, has_column))


def _joined(
    q: WeightDistribution, linear_map: LinearMap, m: Tensor, has_column: bool
) -> tuple[LinearMap, Tensor]:
    """Return map and input for a weight that may have its bias as a column."""
    if not has_column:
        return linear_map, m
    return (
        (BiasColumnMap(linear_map), m) if isinstance(q, FactoredWeight) else linear_map.join_bias(m)
    )


def _covariance(x: Any, q: WeightDistribution | None, matrix: Tensor, has_column: bool) -> Tensor:
    """Return the covariance between the outputs of a dense map, ``(batch, out, out)``."""
    m, _ = moments(x)
    own = _covariance_of(x) if isinstance(x, RandomTensor) else None
    if has_column:
        m = torch.cat([m, torch.ones_like(m[:, :1])], -1)
        own = None if own is None else F.pad(own, (0, 1, 0, 1))
    outer = m.unsqueeze(-1) * m.unsqueeze(-2)
    total = (
        torch.zeros_like(outer[:, :1, :1])
        if q is None
        else q.spread(outer if own is None else outer + own)
    )
    return total if own is None else total + matrix @ own @ matrix.mT


def _covariance_of(x: RandomTensor) -> Tensor:
    if isinstance(x, RandomWeight) and x.part == "whole":
        covariance: Tensor = x.distribution.covariance_matrix
        return covariance
    return torch.diag_embed(x.variance) if x.covariance is None else x.covariance
