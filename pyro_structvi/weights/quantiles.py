"""Quantiles of single elements, exact for normals, mixtures of points and what is made of them."""

from functools import singledispatch
from typing import Any

import torch
from pyro.distributions import TransformedDistribution
from torch import Tensor
from torch.special import ndtri

from pyro_structvi.weights.gaussian import GaussianWeight
from pyro_structvi.weights.point_mass import PointMass


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
    return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)


@quantiles.register
def _(distribution: PointMass, probs: Tensor) -> Tensor:
    return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)


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
    ends, wanted = torch.stack([image(probs), image(1 - probs)]), in_front(probs, image(probs)[0])
    return torch.where(wanted < 0.5, ends.amin(0), ends.amax(0))


def normal_quantiles(mean: Tensor, stddev: Tensor, probs: Tensor) -> Tensor:
    """Return quantiles of normals, with the probabilities in front; a point has no tails."""
    at = ndtri(in_front(probs, mean))
    return torch.where(stddev > 0, mean + stddev * at, mean)


def in_front(probs: Tensor, like: Tensor) -> Tensor:
    """Return probabilities with dimensions of size 1 for those of a tensor."""
    return probs.reshape(-1, *(1 for _ in range(like.dim())))
