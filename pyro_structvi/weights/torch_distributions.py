"""Tensors, medians and feasible points of any torch distribution."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, StudentT, Transform, biject_to
from torch.distributions.constraints import Constraint, independent
from torch.distributions.transforms import ExpTransform
from torch.distributions.utils import lazy_property

from pyro_structvi.linalg.matrices import at_least_single, is_half

DRAWS, SEED = 99, 0  # of medians
FAR = 1000  # roundings, below which the probability of a tail needs double precision
Inverse = type(ExpTransform().inv)


class Container:
    """An object whose tensors change together with the distribution that holds it."""


def base_of(distribution: Any) -> Any:
    """Return a distribution without its ``Independent`` wrappers."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def moments_of(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Return mean and variance, also under ``vmap``, where torch's own of Student's t are an error."""
    if not isinstance(distribution, StudentT):
        return distribution.mean, distribution.variance
    df, loc = distribution.df, distribution.loc
    variance = distribution.scale.square() * df / (df - 2)
    variance = torch.where(df > 2, variance, torch.where(df > 1, math.inf, math.nan))
    return torch.where(df > 1, loc, math.nan), variance


def map_tensors(distribution: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace the tensors of a distribution, and of the distributions and transforms it contains.

    The result is a copy without computed properties, or the distribution itself if no tensor changes.
    """
    change = cache(change)  # an argument under two names stays one, as `_computed_names` expects

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, (list, tuple)):
            new = [changed(each) for each in value]
            is_same = all(one is other for one, other in zip(new, value, strict=True))
            return value if is_same else type(value)(new)
        is_container = isinstance(value, (Distribution, Transform, Container))
        return map_tensors(value, change) if is_container else value

    old = _members(distribution)
    attributes = {name: changed(value) for name, value in old.items()}
    if all(attributes[name] is value for name, value in old.items()):
        return distribution
    new = copy.copy(distribution)
    caches = vars(new).keys() & {"_inv", "_cached_x_y"} if isinstance(new, Transform) else ()
    kept = {name: None if name == "_inv" else (None, None) for name in caches}
    vars(new).clear()
    vars(new).update(kept | attributes)
    return new


def skip_validation(distribution: Any) -> None:
    """Let a distribution and those that it contains take values without checks, in place."""
    distribution._validate_args = False
    for value in vars(distribution).values():
        if isinstance(value, Distribution):
            skip_validation(value)


def _members(distribution: Any) -> dict[str, Any]:
    """Return the attributes of a distribution or a transform that were not computed from others."""
    members = vars(distribution)
    if isinstance(distribution, Transform):  # a transform keeps its inverse, which contains it
        computed = {"_cached_x_y"} | ({"_inv"} if not isinstance(distribution, Inverse) else set())
    else:
        computed = _computed_names(distribution)
    return {name: value for name, value in members.items() if name not in computed}


def _computed_names(distribution: Any) -> set[str]:
    """Return the attributes that were computed from others, such as probabilities from logits."""
    members: dict[str, Any] = vars(distribution)
    kind: Any = type(distribution)
    lazy, cached = _property_names(kind)
    found = {name: value for name, value in members.items() if name in lazy}
    others = [value for name, value in members.items() if name not in lazy | cached]
    given = {id(value) for value in others if isinstance(value, Tensor)}
    # A distribution keeps an argument under another name, too, or has nothing but this argument.
    arguments = {name for name, value in found.items() if id(value) in given}
    return members.keys() & cached | found.keys() - (arguments if given else {*[*found][:1]})


@cache
def _property_names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of lazy properties of torch, and of cached ones."""
    pairs = [pair for base in kind.__mro__ for pair in vars(base).items()]
    lazy, cached = (
        frozenset(name for name, value in pairs if isinstance(value, own))
        for own in (lazy_property, cached_property)
    )
    return lazy, cached


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values of a distribution, and of the distributions and transforms it contains."""
    if isinstance(value, Distribution):
        value = [*vars(value).values()]
    elif isinstance(value, Transform):
        value = [*_members(value).values()]
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def tensors_of(distribution: Any) -> list[Tensor]:
    """Return a distribution's tensors in order; none if it has objects that may hold more."""
    plain = (Tensor, Number, str, type(None), Constraint)
    if not all(isinstance(each, plain) for each in _leaves(distribution)):
        return []
    found: dict[Tensor, None] = {}
    map_tensors(distribution, lambda tensor: found.setdefault(tensor) or tensor)
    return [*found]


def may_depend(distribution: Any) -> bool:
    """Whether a distribution has tensors with gradients, or objects that may hold such tensors."""
    tensors = tensors_of(distribution)
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def log_density(distribution: Any, value: Tensor) -> Tensor:
    """Return log densities, of a sample in place of a value outside of the support."""
    try:
        is_possible = bool(distribution.support.check(value).all())
    except NotImplementedError:
        is_possible = True
    return distribution.log_prob(value if is_possible else distribution.sample())


def in_single(distribution: Any) -> Any:
    """Return a distribution with half-precision tensors in single, so that sums are not rounded."""
    # An eager step calls it for all its distributions, which are seldom in half precision.
    has_half = any(isinstance(each, Tensor) and is_half(each) for each in _leaves(distribution))
    return map_tensors(distribution, at_least_single) if has_half else distribution


def dtype_of_levels(levels: Tensor, like: Tensor) -> torch.dtype:
    """Return the dtype for quantiles: double precision for tails that rounding would change."""
    is_far = torch.minimum(levels, 1 - levels) < FAR * torch.finfo(like.dtype).eps
    return torch.float64 if bool(is_far.any()) else like.dtype


def example_of(prior: Any) -> Tensor:
    """Return a tensor of a distribution's dtype and device: an argument, or else a sample."""
    tensors = tensors_of(prior)
    return tensors[0] if tensors else _draw(prior)


def is_positive(distribution: Any) -> bool:
    """Whether a distribution is continuous and over positive numbers, as that of a scale."""
    support = base_of(distribution).support
    lower = torch.as_tensor(getattr(support, "lower_bound", -math.inf))
    return not support.is_discrete and bool((lower >= 0).all())


def element_support(support: Any) -> Any:
    """Return the constraint of single elements where they are independent, else the support."""
    while isinstance(support, independent):
        support = support.base_constraint
    return support


def median(prior: Distribution) -> Tensor:
    """Return the median of each element; of 99 samples, always the same, without a closed form."""
    base, like = base_of(prior), example_of(prior)
    shape = base.batch_shape + base.event_shape
    try:
        value: Tensor = base.icdf(like.new_full((), 0.5))
    except NotImplementedError:
        devices = [like.device] if like.is_cuda else []
        with torch.random.fork_rng(devices):
            for generator in (
                torch.default_generator,
                *(torch.cuda.default_generators[device.index] for device in devices),
            ):
                generator.manual_seed(SEED)
            value = _draw(base, DRAWS).median(0).values
    return value.expand(shape)


def feasible_point(prior: Any) -> Tensor:
    """Return a value in the support of a distribution: the image of zero under a bijection."""
    bijection, like = biject_to(prior.support), next(iter(tensors_of(prior)), torch.empty(()))
    return bijection(like.new_zeros(bijection.inverse_shape(prior.shape())))


def _draw(prior: Any, *sample_shape: int) -> Tensor:
    try:
        draw: Tensor = prior.sample(torch.Size(sample_shape))
    except NotImplementedError:
        point = feasible_point(prior)
        return point.expand((*sample_shape, *point.shape)).contiguous()
    return draw
