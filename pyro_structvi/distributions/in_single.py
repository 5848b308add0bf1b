"""Distributions of half precision in single, so that densities and moments are not rounded."""

import copy
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

from pyro_structvi.linalg.precision import at_least_single


def in_single(distribution: Any) -> Any:
    """Return a distribution with its tensors of half precision, and those of its parts, in single.

    Args:
        distribution: Any distribution of torch or Pyro, or one of their protocol.

    Returns:
        A copy without what it had formed in half precision; the distribution itself where nothing is.

    Example:
        >>> import torch
        >>> normal = torch.distributions.Normal(torch.zeros(2, dtype=torch.bfloat16), 1.0)
        >>> in_single(normal).log_prob(torch.zeros(2)).dtype
        torch.float32
    """
    members = {name: _member_in_single(value) for name, value in vars(distribution).items()}
    if all(members[name] is value for name, value in vars(distribution).items()):
        return distribution
    new = copy.copy(distribution)
    vars(new).clear()
    vars(new).update(
        (name, value)
        for name, value in members.items()
        if not isinstance(getattr(type(new), name, None), cached_property)
    )
    return new


def _member_in_single(value: Any) -> Any:
    if isinstance(value, Tensor):
        return at_least_single(value)
    return in_single(value) if isinstance(value, Distribution) else value
