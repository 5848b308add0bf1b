"""Models that NUTS draws from, and their draws."""

import pyro.distributions as dist
import torch
from torch import nn

from pyro_structvi import FanIn, Regressor, bayesianize

NUM_DATA, NUM_CHAINS, NUM_SAMPLES = 12, 2, 20
TINY = {"num_warmup": 15, "num_samples": NUM_SAMPLES, "num_chains": NUM_CHAINS, "progress": False}


def make_data(num_data=NUM_DATA):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator)
    return x, x[:, :1] + 0.5 * torch.randn(num_data, 1, generator=generator)


def make_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return Regressor(bayesianize(net, FanIn()), NUM_DATA, dist.Gamma(4.0, 8.0))
