"""Random weights, and moments of linear maps."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi._torch import without_storage
from pyro_structvi.linalg.factorizations import stable_root
from pyro_structvi.linalg.matrices import floored_sqrt, is_half
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.maps.calls import Application, Lookup
from pyro_structvi.maps.linear_map import BiasColumnMap, LinearMap
from pyro_structvi.moments.nonlinear import NODES, averages
from pyro_structvi.moments.random_tensor import RandomTensor, Settings, moments, settings_of, total
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.site_posterior import JointPosterior
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.full_covariance import FullNormal
from pyro_structvi.structures.mean_field import MeanFieldNormal, TransformedNormal
from pyro_structvi.weights.outputs import meet_channels
from pyro_structvi.weights.site_distributions import PointMass
from pyro_structvi.weights.torch_distributions import base_of
from pyro_structvi.weights.weight_distribution import (
    FactoredWeight,
    IndependentWeight,
    WeightDistribution,
)

Sites = Sequence[tuple[LatentSite, Any]]
# The distribution of a random weight, its mean as a matrix, and the factor of an input's variances.
Applied = tuple[WeightDistribution | None, Tensor, Tensor | None]

LARGEST = 4096  # elements of a weight whose covariance is formed to bring it into another order


class RandomWeight(RandomTensor):
    """A weight with a structured posterior, or the weight or bias of a joint posterior.

    Linear maps take their moments from the distribution; other functions from its elements.
    """

    distribution: WeightDistribution
    part: str
    applied: dict[Any, "Applied"]  # shared by all mini-batches of a pass

    def __new__(
        cls,
        distribution: WeightDistribution,
        settings: Settings,
        part: Literal["whole", "weight", "bias"] = "whole",
        shape: torch.Size | None = None,
    ) -> Self:
        shape = distribution.event_shape if shape is None else shape
        weight = without_storage(cls, shape, distribution._first_parameter)
        weight.distribution, weight.part, weight.applied = distribution, part, {}
        weight.settings, weight.covariance = settings, None
        return weight

    @property
    def loc(self) -> Tensor:
        self._check_memory()
        return self.take(self.distribution.mean)

    @property
    def variance(self) -> Tensor:
        self._check_memory()
        return self.take(self.distribution.variance)

    def become(self, other: RandomTensor) -> Self:
        """Refuse, since the posterior would not change along."""
        raise NotImplementedError("A random weight that is changed in place has no moments")

    def take(self, values: Tensor) -> Tensor:
        """Return the elements of this weight among those of its distribution."""
        if self.part == "whole":
            return values
        return values[:, -1] if self.part == "bias" else values[:, :-1].reshape(self.shape)


def member_numbers(guide: StructuredGuide) -> list[int | None]:
    """Return the numbers of a mixture's members, of equal weights, or one None for another guide."""
    if guide.num_members == 1:
        return [None]
    weights = guide.get_buffer("weights")
    if not torch.equal(weights, weights[:1].expand_as(weights)):
        raise NotImplementedError(
            "Moments are those of a mixture with equal weights, but the members of `guide` have "
            f"{[round(weight, 4) for weight in weights.tolist()]}. Predict with draws."
        )
    return [*range(guide.num_members)]


def posteriors_of(joint: JointPosterior, number: int | None = None) -> Sites:
    """Return each global site and its marginal distribution, of a member of a mixture."""
    return [*joint.conditionals("marginals", number=number)]


def random_values(sites: Sites, settings: Settings) -> dict[str, Tensor]:
    """Return the value of each site, which is random unless its distribution is a point."""
    values: dict[str, Tensor] = {}
    for site, q in sites:
        if isinstance(q, WeightDistribution) and site.bias is not None:
            weight, bias = site.names
            values[weight] = RandomWeight(q, settings, "weight", site.bias.weight_shape)
            values[bias] = RandomWeight(q, settings, "bias", site.shape[:1])
        elif isinstance(q, WeightDistribution) and not q.batch_shape:
            values[site.name] = RandomWeight(q, settings)
        else:
            values |= site.split(_value_of(site, q, settings))
    return values


def _value_of(site: LatentSite, q: Any, settings: Settings) -> Tensor:
    base = base_of(q)
    if isinstance(base, PointMass):
        if not base.is_known:
            raise NotImplementedError(
                "The chosen elements of a subnetwork are drawn jointly, and have no moments here. "
                "Predict with draws."
            )
        return q.mean
    if not isinstance(base, TransformedNormal):
        try:
            return RandomTensor(q.mean, q.variance, settings)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The posterior of the site '{site.name}' has no mean and variance in closed form, and "
                "so no moments of outputs. Predict with draws."
            ) from error
    nodes, weights = gauss_hermite(NODES, base.base_dist.mean)
    return RandomTensor(*averages(base.at(nodes), weights), settings)


def linear_moments(application: Application) -> RandomTensor:
    r"""Return the moments of ``linear_map(x, W) + b``.

    With :math:`E[x] = m`, :math:`\operatorname{Var}(x_j) = v_j`, independent of W and of each other,

    .. math:: \operatorname{Var}(y_i) = m^\top \Sigma_i m + \sum_j (\Sigma_{i,jj} + M_{ij}^2) v_j
            + \operatorname{Var}(b_i),

    where :math:`\Sigma_i` is the covariance of row i of W. It is exact for every distribution of W,
    except that the covariance between outputs is lost unless it is kept.

    References:
        Wu, Nowozin, Meeds, Turner, Hernandez-Lobato and Gaunt (2019), "Deterministic variational
        inference for robust Bayesian neural networks", Eq. 5, for independent elements.
    """
    linear_map, x, weight, bias, arrangement = application
    settings = settings_of(x, weight, bias)
    is_stack = arrangement is not None and arrangement.stack > 0  # whose rows are no examples
    is_of_vectors = arrangement is not None and arrangement.is_of_vectors
    if is_of_vectors and not isinstance(weight, RandomWeight):
        return (x * weight).sum(-1, keepdim=True)  # whose covariances are known
    both = isinstance(weight, RandomWeight) and isinstance(bias, RandomWeight)
    is_joint = both and weight.part == "weight" and bias.distribution is weight.distribution
    if arrangement is not None and is_joint:
        raise NotImplementedError(
            "A weight and bias with a joint posterior meet a call that takes the weight's dimensions in "
            "another order, for which they have no moments. Use `join_bias=False`."
        )
    own = distribution_of(weight)
    if not is_joint and own is not None and own is distribution_of(bias):
        raise NotImplementedError(
            "A weight and bias with a joint posterior meet a call after another function of one of "
            "them, for which they have no moments. Use `join_bias=False`."
        )
    bias = None if is_joint else bias
    (m, v), (bias_mean, bias_variance) = moments(x), moments(bias)
    if v is not None and is_half(weight):
        raise NotImplementedError(
            f"A weight in {weight.dtype} meets a random input, whose moments are in single precision. "
            "Convert model and guide by `.float()`, use autocast, or predict with draws."
        )
    q, matrix, factor = _applied(application, is_joint, v is not None)
    loc = (BiasColumnMap(linear_map) if is_joint else linear_map)(m, matrix, bias_mean)

    has_covariance = linear_map.is_dense and loc.dim() == 2 and not is_stack
    if settings.full_covariance and has_covariance:
        of_bias = None if bias_variance is None else covariance_of(bias)
        covariance = total(_covariance(x, q, matrix, is_joint), of_bias)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        found = RandomTensor(loc, variance, settings, covariance)
        found.map_of = own
        return found

    of_input = of_weight = None
    if v is not None and factor is not None:
        of_input = linear_map(v, factor[..., :-1] if is_joint else factor, bias_variance)
    elif bias_variance is not None:
        of_input = meet_channels(linear_map, bias_variance)
    if q is not None:
        # Independent elements depend on an input by its second moments alone.
        at = m if v is None or not isinstance(q, IndependentWeight) else floored_sqrt(m * m + v)
        of_weight = q.image_variance(*with_column(q, linear_map, at, is_joint), loc)
    variance = total(of_input, of_weight).expand(loc.shape)
    found = RandomTensor(loc, variance, settings)
    found.map_of = own

    def form_covariance() -> Tensor:
        """Return the covariance of a weight at the mean input, and of the input."""
        shared: Tensor = torch.zeros_like(variance).diag_embed()
        if q is not None and not isinstance(q, IndependentWeight):
            image = q.image_under(*with_column(q, linear_map, m, is_joint))
            shared = shared + image.covariance_matrix
        if v is not None:
            own = matrix[:, :-1] if is_joint else matrix
            if len(own) > 2 * len(v):  # own diag(v) own' for each row of variances
                shared = shared + (own * v.unsqueeze(-2)) @ own.mT
            else:
                spread: Tensor = F.linear(v, (own.unsqueeze(1) * own).flatten(0, 1))
                shared = shared + spread.reshape(len(v), len(own), -1)
        if bias_variance is not None:
            shared = shared + covariance_of(bias)
        return shared + torch.diag_embed(variance - shared.diagonal(dim1=-2, dim2=-1))

    found.form_covariance = cache(form_covariance) if has_covariance else None
    return found


def lookup_moments(lookup: Lookup) -> RandomTensor:
    """Return the moments of rows that are looked up."""
    weight: RandomTensor = lookup.weight
    loc, variance = (F.embedding(lookup.x, part) for part in (weight.loc, weight.variance))
    return RandomTensor(loc, variance, weight.settings)


def distribution_of(x: Any) -> WeightDistribution | None:
    """Return the distribution of a correlated weight that a tensor is or comes from, or None."""
    own = origin_of(x) if isinstance(x, RandomTensor) else None
    return None if own is None else own[0].distribution


def _applied(application: Application, is_joint: bool, has_random_input: bool) -> Applied:
    """Return the parts of a weight that a linear map takes."""
    weight, arrangement = application.weight, application.arrangement
    key = arrangement, is_joint, has_random_input
    formed = weight.applied if isinstance(weight, RandomWeight) else {}
    if key in formed:
        return formed[key]
    q: WeightDistribution | None = None
    own = (
        (weight, _same) if isinstance(weight, RandomWeight) else getattr(weight, "of_weight", None)
    )
    if own is not None:
        q = _arranged(own, application, is_joint)
    elif isinstance(weight, RandomTensor):
        q = MeanFieldNormal(weight.loc, floored_sqrt(weight.variance), validate_args=False)
        q = q if arrangement is None else q.rearranged(arrangement)
    matrix = application.matrix_of(weight) if q is None else q.as_matrix(q.loc)
    factor = matrix.square() if has_random_input else None
    if q is not None and factor is not None and not isinstance(q, IndependentWeight):
        factor = factor + q.as_matrix(q.variance)
    formed[key] = q, matrix, factor
    return q, matrix, factor


Origin = tuple[RandomWeight, Callable[[Tensor], Tensor]]


def _same(value: Tensor) -> Tensor:
    return value


def origin_of(x: RandomTensor) -> Origin | None:
    """Return the correlated weight and the linear function of it that a tensor is, or None."""
    if isinstance(x, RandomWeight):
        return None if isinstance(x.distribution, IndependentWeight) else (x, _same)
    return x.of_weight


def _arranged(origin: Origin, application: Application, is_joint: bool) -> WeightDistribution:
    """Return the distribution of a linear function of a weight, as a map takes it."""
    (weight, function), arrangement = origin, application.arrangement
    q, is_whole = weight.distribution, weight.part == "whole"
    if function is _same and (is_whole or is_joint):
        found = q if arrangement is None else q.rearranged(arrangement)
        if found is not None:
            return found

    def apply(values: Tensor) -> Tensor:
        own = function(weight.take(values))
        return own if arrangement is None else arrangement(own)

    if is_whole and _is_identity(apply, weight):
        return q
    if arrangement is not None and arrangement.stack:
        raise NotImplementedError(
            "A stack of weights that are correlated has no moments. Predict with draws."
        )
    if q.event_shape.numel() > LARGEST and not (is_whole and isinstance(q, FullNormal)):
        raise NotImplementedError(
            f"A {type(q).__name__} of {q.event_shape.numel()} elements meets a call that takes its "
            "dimensions in another order, without its bias, or after another function, for which it has "
            "no moments. Use a structure with independent elements there, `join_bias=False`, or predict "
            "with draws."
        )
    # Each element is a multiple of one of the weight's, since functions move and scale elements.
    ones = torch.ones(q.event_shape, dtype=torch.float64, device=weight.device)
    numbers, factor = apply(ones.flatten().cumsum(0).reshape(ones.shape)), apply(ones)
    if torch.finfo(factor.dtype).bits < 32:
        raise NotImplementedError(
            "A weight with correlated elements that is converted to half precision has no moments. Use "
            "autocast, or predict with draws."
        )
    order = torch.where(factor == 0, 1, numbers / factor).round().long().flatten() - 1
    scale = factor.flatten().to(q.mean)
    covariance = q.covariance_matrix[order][:, order] * scale * scale.unsqueeze(-1)
    return FullNormal(apply(q.mean), stable_root(covariance), validate_args=False)


def _is_identity(function: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    """Whether a function returns a view of its argument with the same elements, as two transposes do.

    It reads no values, so that a pass can be recorded.
    """
    given = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    found = function(given)
    is_view = found.untyped_storage()._cdata == given.untyped_storage()._cdata
    return is_view and found.shape == given.shape and found.stride() == given.stride()


def with_column(
    q: WeightDistribution, linear_map: LinearMap, x: Tensor, is_joint: bool
) -> tuple[LinearMap, Tensor]:
    """Return map and input for a weight that may have its bias as a column."""
    if not is_joint:
        return linear_map, x
    if isinstance(q, FactoredWeight):
        return BiasColumnMap(linear_map), x
    return linear_map.join_bias(x)


def _covariance(x: Any, q: WeightDistribution | None, matrix: Tensor, is_joint: bool) -> Tensor:
    """Return the covariance between the outputs of a dense map, ``(batch, out, out)``."""
    m, _ = moments(x)
    own = covariance_of(x) if isinstance(x, RandomTensor) else None
    if is_joint:
        m = torch.cat([m, torch.ones_like(m[:, :1])], -1)
        own = None if own is None else F.pad(own, (0, 1, 0, 1))
    outer = m.unsqueeze(-1) * m.unsqueeze(-2)
    spread = torch.zeros_like(outer[:, :1, :1]) if q is None else q.spread(total(outer, own))
    return spread if own is None else spread + matrix @ own @ matrix.mT


def covariance_of(x: Any) -> Tensor:
    """Return the covariance between the elements of the last dimension of a random tensor."""
    if isinstance(x, RandomWeight) and x.part == "whole":
        return x.distribution.covariance_matrix
    return torch.diag_embed(torch.atleast_1d(x.variance)) if x.covariance is None else x.covariance
