"""Exact moments of functions that are linear in each random element, by enumerating two-point draws.

A vector ``m + A e`` with independent signs ``e`` has the mean and the covariance of a normal. Functions
that are linear in each of several such vectors have means and covariances that depend on nothing else.
"""

import itertools

import torch

from pyro_structvi.moments import RandomTensor, Settings


def root(covariance):
    """Return a square root of a covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def enumerated(function, *parts):
    """Return mean and covariance of a function of independent normals.

    Args:
        function: Takes a value of each part, and returns a tensor.
        parts: Pairs of a mean, and of the covariance of all its elements.

    Returns:
        The mean, and the covariance of all elements.
    """
    sizes = [mean.numel() for mean, _ in parts]
    signs = torch.tensor([*itertools.product((-1.0, 1.0), repeat=sum(sizes))])
    values = [
        mean + (own @ root(covariance).mT).reshape(-1, *mean.shape)
        for (mean, covariance), own in zip(parts, signs.split(sizes, -1), strict=True)
    ]
    outputs = torch.func.vmap(function)(*values)
    loc = outputs.mean(0)
    centred = (outputs - loc).flatten(1)
    return loc, centred.mT @ centred / len(signs)


def random_input(*shape, full=False):
    """Return a random tensor, with a covariance of the last dimension where it is to be full."""
    loc, size = torch.randn(shape), shape[-1]
    if not full:
        return RandomTensor(loc, torch.rand(shape) + 0.1, Settings())
    factor = torch.randn(*shape, size)
    covariance = factor @ factor.mT
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return RandomTensor(loc, variance, Settings(full_covariance=True), covariance)


def known(value):
    """Return a random tensor without variance."""
    return RandomTensor(value, torch.zeros_like(value), Settings())


def part_of(x, index=slice(None)):
    """Return mean and covariance of all elements of a random tensor, or of one of its examples."""
    loc = x.loc[index]
    if x.covariance is None:
        return loc, torch.diag(x.variance[index].flatten())
    return loc, torch.block_diag(*x.covariance[index].reshape(-1, *x.covariance.shape[-2:]))


def assert_moments(found, loc, covariance, **tolerance):
    """Compare a random tensor with mean and covariance of all elements, where it has one."""
    torch.testing.assert_close(found.loc, loc, **tolerance)
    variance = covariance.diagonal().reshape(loc.shape)
    torch.testing.assert_close(found.variance, variance, check_stride=False, **tolerance)
    if found.covariance is not None:
        torch.testing.assert_close(part_of(found)[1], covariance, **tolerance)


def assert_exact(found, function, *parts):
    """Compare with the enumerated moments of a function of independent parts."""
    assert_moments(found, *enumerated(function, *parts), rtol=1e-10, atol=1e-12)


def assert_tangent(found, function, x):
    """Compare with ``f(m)`` and ``J S J'``, the moments of an affine function or of a tangent."""
    (mean, covariance), loc = part_of(x), function(x.loc)
    matrix = torch.func.jacrev(function)(mean).reshape(loc.numel(), -1)
    expected = matrix @ covariance @ matrix.mT
    if found.covariance is not None:  # of each row, which may be there twice
        expected = expected * torch.block_diag(*torch.ones_like(found.covariance))
    assert_moments(found, loc, expected)


def assert_same(found, expected, **tolerance):
    """Compare two random tensors."""
    for name in ("loc", "variance", "covariance"):
        own, other = (getattr(each, name) for each in (found, expected))
        torch.testing.assert_close(own, other, check_stride=False, **tolerance)
