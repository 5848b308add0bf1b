"""Copies of distributions whose tensors are leaves of a graph."""

import copy

import torch

from pyro_structvi.testing.contracts import fresh, tensors_of, with_leaves

FLOAT64, FLOAT32 = torch.float64, torch.float32


def named_arguments(q):
    return {name: value for name, (value, _, _) in tensors_of(fresh(q)).items()}


def rebuilt(q, named):
    new = fresh(q)
    tensors = tensors_of(new)
    return copy.deepcopy(new, {id(tensors[name][0]): value for name, value in named.items()})


def with_arguments(q, change):
    """Return a copy of a distribution whose tensors are changed, and leaves."""
    return with_leaves(fresh(q), change)[0]


def arguments(q):
    tensors = [value for value, _, _ in tensors_of(q).values()]
    return [value for value in tensors if value.is_leaf and value.requires_grad]
