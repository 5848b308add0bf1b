"""The covariance between outputs: kept up to date, formed once; and what moments refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import MatrixNormal
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.integration import likelihood_at_nodes
from pyro_structvi.moments.linear import posteriors_of, random_values
from pyro_structvi.moments.net import output_moments
from pyro_structvi.posterior import one_pass

SIZE = 5


class Skip(nn.Module):
    """A net whose output is changed in place after its last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        out = self.first(x)
        out += self.second(x)
        return out


def test_an_output_that_is_changed_in_place_has_the_covariance_of_what_it_became():
    """Terms of a sum are independent; the first one's covariance may not stand for the sum's."""
    model = ps.Classifier(ps.bayesianize(Skip(), prior=1.0), SIZE)
    guide = ps.MatrixNormalGuide(model, init_scale=0.3)
    x = torch.randn(SIZE, 3)
    guide.initialize(x)
    sites = posteriors_of(guide.joint_posterior())
    output = output_moments(model, random_values(sites, Settings()), x, Settings())
    found = ps.predict_moments(model, guide, x)
    assert output.form_covariance is None
    difference = output.loc[:, 0] - output.loc[:, 1]
    nodes, weights = gauss_hermite(64, x)
    logits = difference + output.variance.sum(-1).sqrt() * nodes.unsqueeze(-1)
    expected = weights @ torch.sigmoid(logits)
    torch.testing.assert_close(found.mean[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_the_covariance_of_outputs_is_formed_once_for_all_parts_of_a_batch(monkeypatch):
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 4), prior=1.0), 50)
    guide = ps.MatrixNormalGuide(model)
    x = torch.randn(50, 3)
    guide.initialize(x)
    whole = ps.predict_moments(model, guide, x).mean
    formed = []
    image_under = MatrixNormal.image_under

    def counted(self, *args):
        formed.append(self)
        return image_under(self, *args)

    monkeypatch.setattr(one_pass, "LARGEST", 40)  # five parts
    monkeypatch.setattr(MatrixNormal, "image_under", counted)
    torch.testing.assert_close(ps.predict_moments(model, guide, x).mean, whole)
    assert len(formed) == 1


def test_a_weight_that_is_changed_in_place_is_refused():
    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.mul_(2.0))

    model = ps.Regressor(ps.bayesianize(Scaled(3, 1, bias=False), prior=1.0), SIZE, 0.1)
    moments = ps.moments.NetMoments(model, ps.MeanFieldGuide(model))
    with pytest.raises(NotImplementedError, match="changed in place has no moments"):
        moments(torch.randn(SIZE, 3))


def test_more_logits_than_there_are_nodes_for_are_refused():
    output = RandomTensor(torch.zeros(1, 30_000), torch.ones(1, 30_000), Settings())
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 2), prior=1.0), SIZE)
    with pytest.raises(NotImplementedError, match="up to 21,201 logits"):
        likelihood_at_nodes(model, output, {})


def test_a_view_of_the_same_shape_is_the_tensor_itself():
    """So that a net with ``nn.Flatten`` can be exported, and no value is read."""
    x = RandomTensor(
        torch.zeros(2, 3), torch.ones(2, 3), Settings(True), torch.eye(3).expand(2, 3, 3)
    )
    assert x.flatten(1) is x.view(2, 3) is x.reshape(2, -1) is x
    assert x.flip(1) is not x
