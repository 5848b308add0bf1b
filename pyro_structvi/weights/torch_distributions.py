"""Tensors, medians and feasible points of any torch distribution."""

import copy
from collections.abc import Callable
from functools import cache, cached_property
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution, biject_to
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import ReshapeTransform

from pyro_structvi.linalg.precision import at_least_single, is_half


def base_of(distribution: Any) -> Any:
    """Return what torch's ``Independent``, which ``to_event`` makes, stands around."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def map_tensors(distribution: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a distribution with other tensors in its own place and in those of its parts.

    Args:
        distribution: Any distribution of torch or Pyro, or one of their protocol.
        change: From a tensor to the one in its place; called in the order in which they were set.

    Returns:
        A copy without what it had formed of its tensors; the distribution itself where all stay.
    """

    def of_member(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return map_tensors(value, change) if isinstance(value, Distribution) else value

    kind: Any = type(distribution)
    formed = _cached_names(kind)
    old = {name: value for name, value in vars(distribution).items() if name not in formed}
    members = {name: of_member(value) for name, value in old.items()}
    if all(members[name] is value for name, value in old.items()):
        return distribution
    new = copy.copy(distribution)
    vars(new).clear()
    vars(new).update(members)
    return new


@cache
def _cached_names(kind: type) -> frozenset[str]:
    members = (vars(base).items() for base in kind.__mro__)
    named = (pair for pairs in members for pair in pairs)
    return frozenset(name for name, member in named if isinstance(member, cached_property))


def tensors_of(distribution: Any) -> list[Tensor]:
    """Return the tensors that define a distribution and its parts, in the order in which they were set.

    None, if it keeps tensors in other objects too, such as the joint prior of inducing weights.
    """
    found: list[Tensor] = []

    def is_plain(value: Any) -> bool:
        if isinstance(value, Distribution):
            return all(map(is_plain, vars(value).values()))
        plain = (Tensor, Number, str, type(None), torch.Size, Constraint, ReshapeTransform)
        return all(map(is_plain, value)) if isinstance(value, list) else isinstance(value, plain)

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(distribution, keep)
    return found if is_plain(distribution) else []


def in_single(distribution: Any) -> Any:
    """Return a distribution with its tensors of half precision in single, so that sums are not rounded.

    Example:
        >>> import torch
        >>> normal = torch.distributions.Normal(torch.zeros(2, dtype=torch.bfloat16), 1.0)
        >>> in_single(normal).log_prob(torch.zeros(2)).dtype
        torch.float32
    """
    return map_tensors(distribution, at_least_single) if _has_half(distribution) else distribution


def _has_half(distribution: Any) -> bool:
    return any(
        is_half(value)
        if isinstance(value, Tensor)
        else isinstance(value, Distribution) and _has_half(value)
        for value in vars(distribution).values()
    )


DRAWS = 99


def unwrapped(prior: Any) -> Any:
    """Return a distribution without its ``Independent`` wrappers."""
    while isinstance(prior, Independent):
        prior = prior.base_dist
    return prior


def example_of(prior: Any) -> Tensor:
    """Return a tensor of a distribution's dtype and device: one of its arguments, or else a draw."""
    base = unwrapped(prior)
    while isinstance(base, (Independent, TransformedDistribution)):
        base = base.base_dist
    arguments = (getattr(base, name, None) for name in base.arg_constraints)
    found = next((value for value in arguments if isinstance(value, Tensor)), None)
    example: Tensor = _draw(prior) if found is None else found
    return example


def median(prior: Distribution) -> Tensor:
    """Return the median of each element of a distribution, that of 99 draws without a closed form.

    What has no draws either, such as an improper prior, gets a value of its support.

    Example:
        >>> median(torch.distributions.HalfCauchy(torch.tensor([1.0, 2.0]))).round(decimals=3)
        tensor([1., 2.])
    """
    base = unwrapped(prior)
    shape = base.batch_shape + base.event_shape
    try:
        value: Tensor = base.icdf(example_of(prior).new_full((), 0.5))
    except NotImplementedError:
        value = _draw(base, DRAWS).median(0).values
    return value.expand(shape)


def feasible_point(prior: Any) -> Tensor:
    """Return a value of a distribution's shape and support: the image of zero.

    Example:
        >>> from pyro.distributions import ImproperUniform, constraints
        >>> feasible_point(ImproperUniform(constraints.ordered_vector, (), (3,)))
        tensor([0., 1., 2.])
    """
    bijection = biject_to(prior.support)
    value: Tensor = bijection(torch.zeros(bijection.inverse_shape(prior.shape())))
    return value


def _draw(prior: Any, *sample_shape: int) -> Tensor:
    try:
        draw: Tensor = prior.sample(torch.Size(sample_shape))
    except NotImplementedError:
        point = feasible_point(prior)
        return point.expand((*sample_shape, *point.shape)).contiguous()
    return draw
