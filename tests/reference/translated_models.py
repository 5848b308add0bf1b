"""Models in both languages."""

import torch
from torch import nn

from pyro_structvi import (
    Regressor,
    bayesianize,
)

BATCH, NUM_DATA = 6, 24


def make_regressor(net, prior=1.0, noise_scale=0.3):
    return Regressor(bayesianize(net, prior, normalization=True), NUM_DATA, noise_scale)


class Calls(nn.Module):
    """A net whose forward pass is a linear layer and any function of its output ``(batch, 4)``."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("offset", torch.arange(4.0))
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x) + self.offset)
