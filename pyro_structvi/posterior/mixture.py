"""The predictive distribution: a mixture of the likelihoods at the draws of a posterior."""

import copy
from collections.abc import Iterator
from inspect import getattr_static
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.utils import lazy_property

from pyro_structvi.distributions.own_tensors import base_of, map_tensors, tensors_of
from pyro_structvi.linalg.bisection import bisect

_DRAWS = 2000  # of observations, for quantiles where torch knows no distribution function


class StackedLikelihood:
    """Takes the likelihoods of single draws apart, and puts those of all draws together.

    Args:
        template: The likelihood at one draw, whose first batch dimension is the examples'.
    """

    def __init__(self, template: Any) -> None:
        self.template = template = _as_given(template)
        batch = template.batch_shape
        found = {id(tensor): (path, tensor) for path, tensor in _paths(template)}
        fits = all(tensor.shape[: len(batch)] == batch for _, tensor in found.values())
        is_known = bool(tensors_of(template)) and bool(batch) and fits
        self.paths = {path: key for key, (path, _) in found.items()} if is_known else {}

    def take_apart(self, likelihood: Any) -> dict[str, Tensor]:
        """Return the tensors of a draw's likelihood by names; none if draws of it cannot be stacked."""
        return {f"likelihood.{path}": attrgetter(path)(likelihood) for path in self.paths}

    def put_together(self, tensors: dict[str, Tensor]) -> Any:
        """Return the likelihoods of several draws as one distribution; None if they cannot be stacked.

        Args:
            tensors: What :meth:`take_apart` returns, stacked ``(draws, N, ...)``.
        """
        if not self.paths:
            return None
        new = {key: tensors[f"likelihood.{path}"] for path, key in self.paths.items()}
        stacked = map_tensors(self.template, lambda old: new.get(id(old), old))
        shared = {id(part) for part in _parts(self.template)}
        shape = next(iter(tensors.values())).shape[:2]
        for part in _parts(stacked):
            if id(part) not in shared:
                part._batch_shape = shape + part.batch_shape[1:]
        return stacked


def _as_given(distribution: Any) -> Any:
    """Return a copy without what the distribution has formed of its tensors, such as probabilities."""
    new = copy.copy(distribution)
    kind, members = type(distribution), vars(distribution)
    formed = {
        name for name in members if isinstance(getattr_static(kind, name, None), lazy_property)
    }
    given = {id(value) for name, value in members.items() if name not in formed}
    for name, value in members.items():
        if name in formed and id(value) not in given:
            vars(new).pop(name)
        elif isinstance(value, Distribution):
            vars(new)[name] = _as_given(value)
    return new


def _paths(distribution: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Distribution):
            yield from _paths(value, f"{prefix}{name}.")


def _parts(distribution: Any) -> Iterator[Any]:
    yield distribution
    for value in vars(distribution).values():
        if isinstance(value, Distribution):
            yield from _parts(value)


def mixture_quantile(likelihood: Any, q: Tensor) -> Tensor:
    """Return quantiles of the mixture of a stacked likelihood, for each element of an observation.

    By bisection of the mixture's distribution function, which starts between the least and the largest
    quantile of a part; from draws where the parts have no distribution function, by the order statistics
    whose interval of level l holds one more draw with probability l.

    Args:
        likelihood: Likelihoods ``(draws, N, ...)``.
        q: Levels between 0 and 1, ``(Q,)``.

    Returns:
        The quantiles ``(Q, N, *event)``.
    """
    base = base_of(likelihood)
    levels = q.to(base.mean).reshape(-1, *[1] * (len(base.batch_shape) + len(base.event_shape)))
    try:
        parts = base.icdf(levels)
    except NotImplementedError:
        count = -(-_DRAWS // base.batch_shape[0])
        drawn = likelihood.sample((count,)).flatten(0, 1)
        return _order_statistics(drawn, q)

    def is_below(values: Tensor) -> Tensor:
        found: Tensor = base.cdf(values.unsqueeze(1)).mean(1) < levels.squeeze(1)
        return found

    return bisect(is_below, parts.amin(1), parts.amax(1))


def _order_statistics(draws: Tensor, q: Tensor) -> Tensor:
    """Return the draws ``(S, ...)`` at the positions q (S + 1), the nearest ones outwards."""
    ordered, size = draws.sort(0).values, len(draws)
    positions = q * (size + 1)
    ranks = torch.where(q < 0.5, positions.floor(), positions.ceil()).long() - 1
    return ordered[ranks.clamp(0, size - 1).to(ordered.device)]
