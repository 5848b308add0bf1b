"""Small models that several test files fit: nets, hand-written modules, plain functions."""

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_structvi as ps


def regression_data(size=12, inputs=3):
    x = torch.randn(size, inputs)
    return x, x.sum(-1, keepdim=True) + 0.3 * torch.randn(size, 1)


def make_regressor(size=12, prior=1.0, noise_scale=0.3):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return ps.Regressor(ps.bayesianize(net, prior=prior), size, noise_scale)


def make_linear_regressor(size=12):
    """Return a model of one layer: the quickest to trace, where a test is not about the net."""
    return ps.Regressor(ps.bayesianize(nn.Linear(3, 1), prior=1.0), size, 0.3)


def make_classifier(size=12):
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    return ps.Classifier(ps.bayesianize(net, prior=1.0), size)


def make_image_classifier():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(2),
        nn.Linear(2, 3),
    )
    model = ps.Classifier(ps.bayesianize(net, prior=1.0, normalization=True), 6)
    return model, (torch.randn(6, 1, 3, 3), torch.randint(3, (6,)))


class HandWritten(PyroModule):
    """A module of the user's own: declared sites, one drawn in forward, its own likelihood."""

    def __init__(self):
        super().__init__()
        self.layer = PyroModule[nn.Linear](3, 2)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        self.layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x, y=None):
        mean = self.layer(x)
        noise = pyro.sample("noise", dist.HalfNormal(torch.tensor(1.0)))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, noise).to_event(1), obs=y)
        return mean


def linear_function(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    mean = F.linear(x, weight=weight)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), obs=y)
    return mean


def hierarchical_function(x, y=None):
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0)))
    weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), scale).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(torch.tensor(-1.0), torch.tensor(0.5)))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(F.linear(x, weight), noise).to_event(1), obs=y)


def prior_only():
    """No data: the bound is minus the KL."""
    pyro.sample("weight", dist.Normal(torch.zeros(4, 3), 2.0).to_event(2))
    pyro.sample("vector", dist.Normal(torch.ones(4), 0.5).to_event(1))
    pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), torch.tensor(1.0)))


def recurrent_function(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
    hidden = torch.tanh(F.linear(x, weight))
    mean = F.linear(hidden, weight).sum(-1)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(mean, 0.5), obs=y)
    return mean


def local_latent_function(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        shift = pyro.sample("shift", dist.Normal(0.0, torch.tensor(0.5)))
        mean = F.linear(x, weight).squeeze(-1) + shift
        pyro.sample("obs", dist.Normal(mean, 0.1), obs=y, infer={"is_observation": True})
    return mean
