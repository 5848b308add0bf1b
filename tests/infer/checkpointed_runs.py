"""Runs with all that a checkpoint must hold, in one process."""

import random

import numpy as np
import pyro
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay
from tests.models import make_regressor, regression_data

STEPS = 11  # of three batches an epoch


class Counting(nn.Module):
    """Adds what its calls count, in a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 0.01
        return x + self.calls


def make_model():
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), Counting(), nn.Dropout(0.2)]
    net = nn.Sequential(*layers, nn.Linear(4, 1))
    prior = {"0.weight": None, "*": 1.0}  # one is a point, whose steps have the size of its start
    return ps.Regressor(ps.bayesianize(net, prior, normalization=False), 25, 0.3)


def make_data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(25, 3, generator=generator)
    return x, x.sum(-1, keepdim=True)


class Noisy(TensorDataset):
    """Draws from each of the global generators for each example."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        scale = 1 + 0.1 * (torch.rand(()).item() + random.random() + np.random.rand())  # noqa: NPY002
        return scale * x, y


DATA = {
    "all at once": (lambda x, y: (x, y), None),
    "tensors": (lambda x, y: (x, y), 10),
    "dataset": (Noisy, 10),
}


def train(steps=STEPS, kind="tensors", seed=0, **options):
    pyro.set_rng_seed(seed)
    model = make_model()
    guide = ps.KTiedGuide(model)
    wrap, batch_size = DATA[kind]
    schedules = {"lr": CosineDecay(20, 0.05, 0.005), "kl_weight": ps.LinearAnnealing(8)}
    options = {"batch_size": batch_size, "progress": False} | schedules | options
    history = ps.fit(model, guide, wrap(*make_data()), num_steps=steps, **options)
    history.compilation.clear()  # which says when, by measured times
    return {
        **{f"guide.{name}": value for name, value in guide.state_dict().items()},
        **{f"model.{name}": value for name, value in model.state_dict().items()},
        "calls": model.net[3].calls,
        **{name: values for name, values in vars(history).items() if isinstance(values, list)},
        "next": [torch.rand(()).item(), random.random(), np.random.rand()],  # noqa: NPY002
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert is_same(found[name], value), name


def until(stop):
    return lambda step: 1 / 0 if step == stop else CosineDecay(20, 0.05, 0.005)(step)


def constant(step):
    return 0.1


def fit(guide=ps.KTiedGuide, size=25, model=None, **options):
    pyro.set_rng_seed(0)
    model = make_regressor(size) if model is None else model()
    own = guide(model)
    before = {name: value.clone() for name, value in own.state_dict().items()}
    options = {"batch_size": 10, "num_steps": 4, "progress": False, "lr": constant} | options
    options = {"kl_weight": 1.0, "optimizer": torch.optim.Adam} | options
    data = options.pop("data", regression_data(size))
    try:
        ps.fit(model, own, data, **options)
    finally:
        is_same = all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
        fit.changed = not is_same
