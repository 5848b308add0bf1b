"""Guides of inducing weights of every kind, and comparisons of guides."""

import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.families import InducingWeights, LowRank
from tests.models import make_regressor

SHAPE = (3, 2)

KINDS = {
    "diagonal": {"inducing_posterior": "diagonal"},
    "matrix": {"inducing_posterior": "matrix"},
    "full": {"inducing_posterior": "full"},
    "ensemble": {"inducing_posterior": "ensemble", "ensemble_size": 3},
    "matrix, shared": {"inducing_posterior": "matrix", "shared": True},
    "full, shared": {"inducing_posterior": "full", "shared": True},
    "a family": {"inducing_posterior": LowRank(rank=1, diagonal="constant")},
    "nested": {"inducing_posterior": InducingWeights((2, 1))},
    "nested, shared": {"inducing_posterior": InducingWeights((2, 1)), "shared": True},
}
EVERY_KIND = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def make_guide(model=None, shape=SHAPE, **options):
    return ps.InducingWeightGuide(make_regressor() if model is None else model, shape, **options)


def randomize(guide, scale=0.1):
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return guide


def draw(guide):
    torch.manual_seed(0)
    with torch.no_grad():
        return guide.draw()


def assert_same_draws(guide, other):
    ours, theirs = draw(guide), draw(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
