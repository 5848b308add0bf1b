"""Lazy weights of several distributions, for their tests."""

import torch
from pyro import poutine

from pyro_structvi.distributions import KTiedNormal, MeanFieldNormal
from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_role import SiteUse

OUT, IN = 4, 3
KERNEL = (OUT, 2, 3, 2)


def k_tied_normal(shape=(OUT, IN)):
    """Return a k-tied Normal with random arguments that are leaves."""
    size = torch.Size(shape[1:]).numel()
    arguments = torch.randn(shape), torch.rand(shape[0], 2) + 0.1, torch.rand(size, 2) + 0.1
    return KTiedNormal(*(argument.requires_grad_() for argument in arguments))


def bias_normal():
    return MeanFieldNormal(torch.randn(OUT), torch.full((OUT,), 0.5))


def narrow_normal(*shape):
    """Return a weight of nearly zero, so that what a layer adds to it shows."""
    return MeanFieldNormal(torch.zeros(shape), torch.tensor(1e-9))


def lazy(distribution=None, name="weight", count=1, local_reparam=True):
    use = SiteUse(name, local_reparam=local_reparam, count=count)
    return LazyWeight(k_tied_normal() if distribution is None else distribution, use)


def convolution_weight(dim=2, **options):
    return lazy(k_tied_normal((OUT, 2, 3, 2, 2)[: dim + 2]), **options)


def is_ordinary(tensor):
    return type(tensor) is torch.Tensor


def run_lazily(layer, guide, x):
    """Run a layer on what its guide hands it under StructuredELBO."""
    guide.initialize(x)
    for use in guide.uses.values():
        use.is_uncompared = False  # as under observations of single examples
    with DelayDraws():
        trace = poutine.trace(guide).get_trace(x)
    return poutine.replay(layer, trace)(x).detach()
