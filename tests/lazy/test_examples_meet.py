"""Examples that meet at the loss, as in contrastive learning: all must have one weight."""

import random

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn

import pyro_structvi as ps


class Contrastive(PyroModule):
    """Each image finds its text among those of the batch."""

    def __init__(self):
        super().__init__()
        self.image = ps.bayesianize(nn.Linear(3, 2), prior=1.0)
        self.text = ps.bayesianize(nn.Linear(4, 2), prior=1.0)

    def forward(self, image, text):
        logits = self.image(image) @ self.text(text).T
        with pyro.plate("data", len(image)):
            pyro.sample("obs", dist.Categorical(logits=logits), obs=torch.arange(len(image)))


def make(local_reparam, init_scale=0.7):
    torch.manual_seed(3)
    data = torch.randn(6, 3), torch.randn(6, 4)
    model = Contrastive()
    guide = ps.MeanFieldGuide(model, init_scale=init_scale, local_reparam=local_reparam)
    return model, guide, data


@pytest.mark.parametrize("local_reparam", [True, "exact"])
def test_the_weights_are_drawn_and_the_report_says_so(local_reparam):
    model, guide, data = make(local_reparam)
    found = {each.name: each for each in guide.report(*data).parameters}
    for name in ("image.weight", "text.weight"):
        assert (found[name].drawn, found[name].why) == ("weight", "examples that interact")
    torch.manual_seed(0)
    own = ps.StructuredELBO().terms(model, guide, *data).elbo
    model, guide, data = make(False)
    guide.initialize(*data)
    torch.manual_seed(0)
    assert own == ps.StructuredELBO().terms(model, guide, *data).elbo


class Dropping(nn.Linear):
    """Decides by Python's random numbers."""

    def forward(self, x):
        return super().forward(x if random.random() < 0.5 else -x)


def test_runs_that_are_compared_have_the_same_random_numbers_of_python():
    model = ps.Regressor(ps.bayesianize(Dropping(3, 1), prior=1.0), 12, 0.3)
    for seed in range(8):
        random.seed(seed)
        guide = ps.MeanFieldGuide(model)
        guide.initialize(torch.randn(12, 3), torch.randn(12, 1))
        assert guide.uses["net.weight"].allows_outputs
    assert random.random() == random.Random(7).random()
