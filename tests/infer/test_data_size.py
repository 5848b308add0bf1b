"""What fit notices of the model before it trains: how many examples it counts, what is frozen."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps
from pyro_structvi.infer.data_warnings import NumDataWarning
from tests.models import linear_function


def scaled_function(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", 12, subsample=x):
        mean = nn.functional.linear(x, weight)
        pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), obs=y)


DATA = torch.ones(12, 3, dtype=torch.float64), torch.ones(12, 2, dtype=torch.float64)
FORMS = {
    "tensors": (DATA, {"batch_size": 4}),
    "loader": (DataLoader(TensorDataset(*DATA), 4), {}),
    "batches": ([tuple(part[:4] for part in DATA)] * 3, {}),
}


@pytest.mark.parametrize(("data", "options"), FORMS.values(), ids=FORMS)
def test_a_model_that_counts_a_batch_for_all_is_named(data, options):
    guide = ps.MeanFieldGuide(linear_function)
    with pytest.warns(NumDataWarning, match=r"\['obs'\] count a mini-batch.*has 3 mini-batches"):
        ps.fit(linear_function, guide, data, num_steps=1, progress=False, **options)


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [(linear_function, DATA, {}), *((scaled_function, *form) for form in FORMS.values())],
    ids=["all at once", *FORMS],
)
def test_a_plate_that_knows_all_examples_is_fine(model, data, options):
    ps.fit(model, ps.MeanFieldGuide(model), data, num_steps=1, progress=False, **options)


class Backbone(nn.Module):
    """A frozen part with statistics and dropout before a head."""

    def __init__(self):
        super().__init__()
        parts = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.backbone = nn.Sequential(*parts).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        self.modes = []

    def forward(self, x):
        self.modes.append([part.training for part in (*self.backbone, *self.head)])
        return self.head(self.backbone(x))


@pytest.mark.parametrize(("in_evaluation", "whole"), [(True, True), (True, False), (False, False)])
def test_a_frozen_part_in_evaluation_mode_stays_so(in_evaluation, whole):
    net = Backbone()
    bayes_net = ps.bayesianize(net, normalization=False)
    model = ps.Regressor(bayes_net, 12, 0.5)
    if in_evaluation:
        (model if whole else bayes_net.backbone).eval()
    before = bayes_net.backbone[1].running_mean.clone()
    modes = [part.training for part in model.modules()]
    ps.fit(model, ps.MeanFieldGuide(model), DATA, num_steps=2, progress=False)
    frozen = not in_evaluation
    assert bayes_net.modes[-1] == [frozen, frozen, frozen, True, True]
    assert torch.equal(bayes_net.backbone[1].running_mean, before) == in_evaluation
    assert [part.training for part in model.modules()] == modes
