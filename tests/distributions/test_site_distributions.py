"""Points, auxiliary variables of a guide, and members that all of Pyro's distributions have."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_structvi.distributions import (
    Auxiliary,
    InducingNormal,
    MeanFieldNormal,
    PointMass,
    PointMixture,
    ScaleMixtureNormal,
)
from tests.distributions.cases import CASES, MATRIX, make_joint
from tests.unit_noise import close


def test_the_kl_of_a_point_is_its_negative_log_density():
    value = torch.randn(2, 3)
    for prior in (dist.Normal(value, 0.3), dist.Laplace(torch.zeros(2, 3), 1.0)):
        close(kl_divergence(PointMass(value, 2), prior.to_event(2)), -prior.log_prob(value).sum())
        rows = kl_divergence(PointMass(value, 1), prior.to_event(1))
        close(rows, -prior.log_prob(value).sum(-1))
    gamma = dist.Gamma(torch.tensor(2.0), 3.0)
    value = torch.tensor(0.7)
    assert kl_divergence(PointMass(value, 0), gamma) == -gamma.log_prob(value)


def test_a_draw_with_known_moments_has_the_expected_kl():
    mean, variance, scale = torch.randn(3), torch.rand(3), torch.rand(3) + 0.5
    prior = dist.Normal(torch.randn(3), scale).to_event(1)
    q = PointMass(torch.randn(3), 1, mean, variance)
    close(kl_divergence(q, prior), (variance / scale**2).sum() / 2 - prior.log_prob(mean))
    with pytest.raises(NotImplementedError):
        kl_divergence(q, dist.StudentT(3.0, torch.zeros(3), 1.0).to_event(1))


def test_a_call_of_a_point_returns_the_value_and_a_draw_a_copy():
    value = torch.randn(3)
    q = PointMass(value, 1)
    assert q().data_ptr() == value.data_ptr()
    assert torch.equal(q.rsample(), value)
    assert q.rsample().data_ptr() != value.data_ptr()
    assert q.rsample((2,)).shape == (2, 3)
    assert q.log_prob(value) == 0
    assert q.expand((4,)).batch_shape == (4,)


@pytest.mark.parametrize("with_prior", [True, False])
def test_an_auxiliary_is_scored_against_its_prior_or_by_its_entropy(with_prior):
    posterior = MeanFieldNormal(torch.randn(3), torch.tensor(0.7))
    prior = dist.Normal(torch.zeros(3), 2.0).to_event(1) if with_prior else None
    q, value = Auxiliary(posterior, prior), torch.randn(4, 3)
    expected, kl = posterior.log_prob(value), -posterior.entropy()
    if with_prior:
        expected, kl = expected - prior.log_prob(value), kl_divergence(posterior, prior)
    close(q.log_prob(value), expected)
    close(q.kl(), kl)
    expanded = q.expand(torch.Size([4]))
    assert expanded.batch_shape == (4,)
    assert (expanded.prior is not None) == with_prior
    close(expanded.log_prob(value), expected)
    close(expanded.to_event(1).log_prob(value), expected.sum())
    assert torch.equal(q.mean, posterior.mean)
    assert torch.equal(q.stddev, posterior.stddev)


def test_members_of_torch_distributions():
    q = CASES[0].make((3,), MATRIX, torch.float64)
    value = q()
    assert q.shape() == q(torch.Size()).shape == value.shape == (3, *MATRIX)
    assert q.shape((5,)) == q.rsample((5,)).shape == (5, 3, *MATRIX)
    assert (q.event_dim, q.has_enumerate_support, q.has_rsample) == (2, False, True)
    assert q.support.check(value).shape == (3,)
    mask = torch.tensor([True, False, True])
    close(q.mask(mask).log_prob(value), q.log_prob(value) * mask)
    bare = type(q).__new__(type(q))
    assert q.expand((2, 3), _instance=bare) is bare
    close(bare.log_prob(value), q.log_prob(value).expand(2, 3))


def test_modes_where_they_are_defined():
    q, point = CASES[0].make((3,), MATRIX, torch.float64), torch.randn(3, 2)
    close(q.mode, q.mean)
    assert torch.equal(PointMass(point, 2).mode, point)
    assert ScaleMixtureNormal(torch.tensor([1.0, 0.1]), torch.tensor([0.5, 0.5])).mode == 0
    members = PointMixture(torch.randn(4, 3, 2))
    mixture = InducingNormal.from_inducing(make_joint((), (3, 3), torch.float64), members, 0.5)
    with pytest.raises(NotImplementedError, match="no mode in closed form"):
        _ = mixture.mode
