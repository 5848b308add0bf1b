"""Guides that join biases to weights."""

from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import LowRank
from tests.models import make_regressor

JOINED = LowRank(rank=2, diagonal="full", join_bias=True)


def make_guide(model=None, init_scale=0.4, family=JOINED, **options):
    return ps.StructuredGuide(
        make_regressor() if model is None else model,
        {"*": family},
        init_scale=init_scale,
        **options,
    )


def linear_model(out=2, size=12, **priors):
    """Return a linear layer with unlike priors of weight and bias, and data for it."""
    priors = {"weight": 0.7, "bias": 1.5} | priors
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, out), prior=priors), size, noise_scale=0.5)
    return model, (torch.randn(size, 3), torch.randn(size, out))


def layer_function(prefix="", around=nullcontext):
    """Return a plain function with one layer, whose weight is sampled in a context."""

    def model(x, y=None, with_bias=True):
        bias = None
        with around():
            prior = dist.Normal(torch.zeros(1, 3), 1.0).to_event(2)
            weight = pyro.sample(f"{prefix}weight", prior)
        if with_bias:
            bias = pyro.sample(f"{prefix}bias", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(F.linear(x, weight, bias), 1.0).to_event(1), obs=y)

    return model
