"""Small models, guides, data and tensors, of which valid arguments are made."""

import tempfile

import torch
from matplotlib.figure import Figure
from torch import nn

import pyro_structvi as ps
from tests.distributions.cases import make_joint

SIZE = 6
FILES = tempfile.TemporaryDirectory()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def regressor():
    return ps.Regressor(ps.bayesianize(net(), prior=1.0), SIZE, 0.3)


def normalized_regressor():
    parts = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    return ps.Regressor(ps.bayesianize(parts, prior=1.0, normalization=False), SIZE, 0.3)


def classifier():
    return ps.Classifier(ps.bayesianize(nn.Linear(3, 2), prior=1.0), SIZE)


def inputs():
    return torch.randn(SIZE, 3)


def targets():
    return torch.randn(SIZE, 1)


def model_and_guide(guide=ps.MeanFieldGuide):
    model = regressor()
    return {"model": model, "guide": guide(model)}


def positive(*shape):
    return torch.rand(shape) + 0.5


OPTIONS = {
    "init_scale": 0.01,
    "init_loc_fn": lambda site: None,
    "local_reparam": True,
    "create_plates": None,
}


def joint():
    return make_joint((), (4, 3), torch.float64)


def probabilities():
    return torch.randn(SIZE, 3).softmax(-1)


def axes():
    return Figure().subplots()


def passes():
    return {**model_and_guide(), "x": inputs(), "y": targets()}
