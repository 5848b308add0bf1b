"""Quantiles of single elements, exact for normals, mixtures of points and what is made of them."""

from functools import singledispatch
from typing import Any

import torch
from pyro.distributions import TransformedDistribution
from torch import Tensor
from torch.special import ndtr, ndtri

from pyro_structvi.distributions.dropout import BernoulliDropout
from pyro_structvi.distributions.gaussian_weight import GaussianWeight
from pyro_structvi.distributions.inducing import InducingNormal
from pyro_structvi.distributions.point_mass import PointMass
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.linalg.bisection import bisect


@singledispatch
def quantiles(distribution: Any, probs: Tensor) -> Tensor:
    """Return the quantiles of each element by itself.

    Of a transformed distribution they are the transformed quantiles: exact where each element is
    transformed by itself, as onto the positive numbers; otherwise, as onto a simplex, the values that
    belong to the quantiles of the unconstrained elements. Those of K equally likely points are
    interpolated, as by :func:`torch.quantile`.

    Args:
        distribution: A posterior.
        probs: Numbers from 0 to 1, ``(num,)``.

    Returns:
        The quantiles, ``(num, *batch_shape, *event_shape)``.

    Raises:
        NotImplementedError: If there is no rule for this kind of distribution.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> q = MeanFieldNormal(torch.tensor([0.0, 10.0]), torch.tensor([1.0, 2.0]))
        >>> quantiles(q, torch.tensor([0.5, 0.975])).round(decimals=2)
        tensor([[ 0.0000, 10.0000],
                [ 1.9600, 13.9200]])
    """
    raise NotImplementedError(f"There is no rule for the quantiles of {type(distribution)}.")


@quantiles.register
def _(distribution: GaussianWeight, probs: Tensor) -> Tensor:
    return _of_normals(distribution.mean, distribution.variance.sqrt(), probs)


@quantiles.register
def _(distribution: PointMass, probs: Tensor) -> Tensor:
    return _of_normals(distribution.mean, distribution.variance.sqrt(), probs)


@quantiles.register
def _(distribution: PointMixture, probs: Tensor) -> Tensor:
    members = distribution.members.movedim(-len(distribution.event_shape) - 1, 0)
    return torch.quantile(members, probs, 0)


@quantiles.register
def _(distribution: BernoulliDropout, probs: Tensor) -> Tensor:
    """Of each weight, which is zero or one other value."""
    probs, kept = _in_front(probs, distribution.loc), distribution.loc / (1 - distribution.rate)
    is_upper = probs > torch.where(kept > 0, distribution.rate, 1 - distribution.rate)
    return torch.where(is_upper, kept.clamp(min=0), kept.clamp(max=0))


@quantiles.register
def _(distribution: InducingNormal, probs: Tensor) -> Tensor:
    """Of a normal, or of the mixture of normals of one variance that an ensemble makes."""
    inducing = distribution.inducing
    if not isinstance(inducing, PointMixture):
        if distribution.is_mixture:
            raise NotImplementedError("There is no rule for the quantiles of nested ensembles.")
        return _of_normals(distribution.mean, distribution.variance.sqrt(), probs)
    given = [distribution.given(member) for member in inducing.members.movedim(-3, 0)]
    means, stddev = torch.stack([each.mean for each in given]), given[0].variance.sqrt()
    ends = _of_normals(means, stddev, probs)
    wanted = _in_front(probs, stddev)

    def is_below(values: Tensor) -> Tensor:
        found: Tensor = ndtr((values.unsqueeze(1) - means) / stddev).mean(1) < wanted
        return found

    return bisect(is_below, ends.amin(1), ends.amax(1))


@quantiles.register
def _(distribution: TransformedDistribution, probs: Tensor) -> Tensor:
    """Of what a bijection makes of a distribution; it may fall, as onto the negative numbers."""

    def image(probs: Tensor) -> Tensor:
        values = quantiles(distribution.base_dist, probs)
        for transform in distribution.transforms:
            values = transform(values)
        return values

    try:
        _ = [transform.sign for transform in distribution.transforms]
    except NotImplementedError:  # not of each element by itself
        return image(probs)
    ends, wanted = torch.stack([image(probs), image(1 - probs)]), _in_front(probs, image(probs)[0])
    return torch.where(wanted < 0.5, ends.amin(0), ends.amax(0))


def _of_normals(mean: Tensor, stddev: Tensor, probs: Tensor) -> Tensor:
    at = ndtri(_in_front(probs, mean))
    return torch.where(stddev > 0, mean + stddev * at, mean)  # a point has no tails


def _in_front(probs: Tensor, like: Tensor) -> Tensor:
    return probs.reshape(-1, *(1 for _ in range(like.dim())))
