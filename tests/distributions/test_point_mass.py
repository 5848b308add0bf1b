"""PointMass: its divergence from a prior is an expected negative log density."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_structvi.distributions import PointMass
from tests.statistics import assert_mean


def test_a_value_has_its_negative_log_density():
    value = torch.randn(2, 3)
    for prior in (dist.Normal(value, 0.3), dist.Laplace(torch.zeros(2, 3), 1.0)):
        expected = -prior.log_prob(value).sum()
        torch.testing.assert_close(kl_divergence(PointMass(value, 2), prior.to_event(2)), expected)
    gamma = dist.Gamma(torch.tensor(2.0), 3.0)
    value = torch.tensor(0.7)
    assert kl_divergence(PointMass(value, 0), gamma) == -gamma.log_prob(value)


def test_batches_keep_their_shape():
    prior = dist.Normal(torch.zeros(4, 3), 1.0).to_event(1)
    assert kl_divergence(PointMass(torch.zeros(4, 3), 1), prior).shape == (4,)


def test_a_draw_with_known_moments_has_the_expected_one():
    mean, variance = torch.randn(3), torch.rand(3)
    prior = dist.Normal(torch.randn(3), torch.rand(3) + 0.5).to_event(1)
    draws = mean + variance.sqrt() * torch.randn(5000, 3)
    expected = kl_divergence(PointMass(draws[0], 1, mean, variance), prior)
    assert_mean(-prior.log_prob(draws), expected)


def test_the_moments_of_a_draw_do_not_serve_another_prior():
    q = PointMass(torch.zeros(3), 1, torch.zeros(3), torch.ones(3))
    with pytest.raises(NotImplementedError):
        kl_divergence(q, dist.StudentT(3.0, torch.zeros(3), 1.0).to_event(1))


def test_a_call_returns_the_value_and_a_draw_a_copy():
    value = torch.randn(3)
    q = PointMass(value, 1)
    assert q().data_ptr() == value.data_ptr()
    assert torch.equal(q.rsample(), value)
    assert q.rsample().data_ptr() != value.data_ptr()
    assert q.rsample((2,)).shape == (2, 3)
    assert q.log_prob(value) == 0
    assert q.expand((4,)).batch_shape == (4,)
