"""Fits that are validated."""

import random

import numpy as np
import pyro
import torch
from torch import nn

import pyro_structvi as ps
from tests.models import make_regressor, regression_data


def make(size=24, guide=ps.MeanFieldGuide, model=None):
    pyro.set_rng_seed(0)
    model = make_regressor(size) if model is None else model()
    return model, guide(model), regression_data(size)


def held_out(size=9):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(-1, keepdim=True)


def snapshot(*modules):
    return {
        f"{number}.{name}": value.clone()
        for number, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }


def numbers():
    return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Recorder:
    """A metric that returns given values and writes down the parameters at each call."""

    def __init__(self, values, *modules):
        self.values, self.modules, self.states = iter(values), modules, []

    def __call__(self, prediction, y):
        self.states.append(snapshot(*self.modules))
        numbers()  # a metric may draw
        return next(self.values)


def noisy_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=False), 24, 0.3)
