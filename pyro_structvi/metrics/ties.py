"""Values in the order of keys, where equal keys leave the order open."""

import torch
from torch import Tensor


def in_order_of(keys: Tensor, values: Tensor) -> Tensor:
    """Return values sorted by ascending keys, each replaced by the mean of its ties.

    That is the expectation over all orders of examples with equal keys. A sum of the first values is
    then a function of the pairs of keys and values, and not of the order in which they were given.

    Args:
        keys: ``(N,)``.
        values: ``(N,)``, in double.

    Returns:
        The values ``(N,)``.
    """
    _, group, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts)).index_add(0, group, values)
    averages: Tensor = sums / counts
    return averages.repeat_interleave(counts)
