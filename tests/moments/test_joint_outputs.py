"""The covariance between outputs, and what moments refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import FullNormal, MatrixNormal, MeanFieldNormal
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.integration import likelihood_at_nodes
from pyro_structvi.moments.linear import RandomWeight

SIZE = 5


@pytest.mark.parametrize("size", [2, 7], ids=["few outputs", "more outputs than examples"])
def test_the_covariance_that_is_formed_on_demand_is_the_one_that_is_kept(size):
    """For a weight of independent elements, for which it is exact."""
    q = MeanFieldNormal(torch.randn(size, 3), torch.rand(size, 3) + 0.2)
    bias = FullNormal(torch.randn(size), torch.randn(size, size).tril(-1) + torch.eye(size))
    loc, variance = torch.randn(2, 3), torch.rand(2, 3)

    def outputs(settings):
        x = RandomTensor(loc, variance, settings)
        return F.linear(x, RandomWeight(q, settings), RandomWeight(bias, settings))

    formed, kept = outputs(Settings()).form_covariance(), outputs(Settings(True)).covariance
    torch.testing.assert_close(formed, kept)


def test_pairs_at_nodes_have_their_covariance():
    """Of a mean and the output for its noise."""
    covariance = torch.tensor([[[1.0, -0.5], [-0.5, 2.0]]])
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    output = RandomTensor(torch.tensor([[0.3, 4.0]]), variance, Settings(True), covariance)
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 2), 1.0), SIZE, noise="heteroscedastic")
    at = likelihood_at_nodes(model, output, {})
    base = at.likelihood.base_dist
    pair = torch.cat([base.loc, base.scale.expm1().log()], -1).squeeze(1) - output.loc
    found = pair.mT @ (at.weights.unsqueeze(-1) * pair)
    torch.testing.assert_close(found, covariance[0], rtol=1e-6, atol=1e-8)


def test_an_output_that_is_changed_in_place_loses_its_covariance():
    """Terms of a sum are independent, and have no covariance in common."""
    q = MatrixNormal(torch.randn(2, 3), torch.eye(2), torch.eye(3))
    found = F.linear(torch.randn(SIZE, 3), RandomWeight(q, Settings()))
    assert found.form_covariance is not None
    found += torch.randn(SIZE, 2)
    assert found.form_covariance is None


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
