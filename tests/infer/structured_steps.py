"""Guides, and their gradients, for steps of ``StructuredAdam``."""

import torch

import pyro_structvi as ps
from pyro_structvi.extend import SitePosterior
from tests.models import make_regressor, regression_data


def gradients(guide, model, seed):
    torch.manual_seed(seed)
    x, y = regression_data()
    guide.zero_grad()
    ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()


def make(make_guide):
    model = make_regressor()
    guide = make_guide(model)
    guide.initialize(*regression_data())
    return model, guide


def posteriors(guide):
    return [each for each in guide.modules() if isinstance(each, SitePosterior)]


def rates_of(optimizer):
    return {
        value: group["lr"] * group["unit"]
        for group in optimizer.param_groups
        for value in group["params"]
    }


def snapshot(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}
