"""Medians of priors, in closed form where there is one."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution, biject_to

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
