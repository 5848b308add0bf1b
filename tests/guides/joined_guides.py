"""Guides that join biases to weights, and their dense laws."""

import torch
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
