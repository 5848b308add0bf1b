"""Moments of functions of a normal by numerical integration, as oracles."""

import numpy as np

REACH, PANEL, NODES = 40.0, 0.5, 20
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(NODES)


def normal_moments(function, mean, scale, kinks=()):
    """Return mean and variance of ``function(x)`` for ``x ~ N(mean, scale^2)``.

    Gauss-Legendre's rule on panels of half a standard deviation, cut where the function has kinks, in
    extended precision. The variance is an integral about the mean, so that nothing is subtracted.
    """
    mean, scale = np.longdouble(mean), np.longdouble(scale)
    edges = np.arange(-REACH, REACH + PANEL, PANEL, dtype=np.longdouble)
    cuts = [(np.longdouble(kink) - mean) / scale for kink in kinks]
    edges = np.unique(np.concatenate([edges, [cut for cut in cuts if abs(cut) < REACH]]))
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    z = (middle[:, None] + half[:, None] * _NODES).ravel()
    weights = (half[:, None] * _WEIGHTS).ravel() * np.exp(-z * z / 2)
    weights = weights / np.sqrt(2 * np.pi * np.ones((), np.longdouble))
    values = function(mean + scale * z)
    first = (weights * values).sum()
    return first, (weights * (values - first) ** 2).sum()
