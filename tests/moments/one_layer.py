"""Nets of one random layer, whose outputs have exact moments, and integrals over these."""

import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.moments.linear import posteriors_of
from tests import dense_oracles as dense

SIZE = 5


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def linear(size=2, inputs=3):
    return ps.bayesianize(nn.Linear(inputs, size), prior=1.0)


def spread_out(guide, *args):
    guide(*args)
    for parameter in guide.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return guide


def fitted(model, guide=ps.MeanFieldGuide, scale=0.4, **options):
    if guide is ps.MeanFieldGuide:
        options = {"init_scale": scale} | options
    return spread_out(guide(model, **options), torch.zeros(SIZE, 3))


def output_moments(guide, x):
    """Return mean and covariance ``(N, out), (N, out, out)`` of a dense layer, by dense covariances."""
    loc = covariance = 0.0
    for site, q in posteriors_of(guide.joint_posterior(x)):
        if not site.name.startswith("net."):
            continue
        size = q.event_shape[0]
        inputs = x if q.event_shape[1:].numel() == x.shape[-1] else F.pad(x, (0, 1), value=1.0)
        inputs = inputs if len(q.event_shape) > 1 else torch.ones(len(x), 1)
        matrix = q.covariance_matrix if hasattr(q, "covariance_matrix") else torch.zeros(())
        matrix = matrix.expand(q.event_shape.numel(), q.event_shape.numel())
        loc = loc + inputs @ q.mean.reshape(size, -1).mT
        covariance = covariance + dense.image_covariance(inputs, matrix, size)
    return loc, covariance


def variances(covariance):
    return covariance.diagonal(dim1=-2, dim2=-1)


def noise_posterior(guide, x):
    q = next(q for site, q in posteriors_of(guide.joint_posterior(x)) if "noise" in site.name)
    while not hasattr(q, "transforms"):
        q = q.base_dist
    return q.base_dist.mean, q.base_dist.stddev


def grid_of(mean, scale, count=2001, reach=9.0):
    """Return points of normals along a first dimension, and weights of the trapezoid's rule."""
    z = torch.linspace(-reach, reach, count)
    weights = torch.exp(-0.5 * z.square())
    shape = (count, *(1 for _ in mean.shape))
    return mean + scale * z.reshape(shape), (weights / weights.sum()).reshape(shape)


def expected_log_likelihood(model, guide, x, y):
    """Return what the bound by moments has for it, with its graph left behind."""
    terms = StructuredELBO(estimator="moments").terms(model, guide, x, y)
    return terms.log_likelihood["obs"].detach()
