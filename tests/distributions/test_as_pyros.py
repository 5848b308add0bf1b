"""Distributions answer what Pyro's own do, and that by the numbers."""

import pyro.distributions as dist
import pytest
import torch

from pyro_structvi.distributions import (
    Auxiliary,
    InducingNormal,
    MeanFieldNormal,
    PointMass,
    PointMixture,
    ScaleMixtureNormal,
)
from tests.distributions.cases import CASES, MATRIX, make_joint


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_members_of_torch_distributions():
    q = CASES[0].make((3,), MATRIX, torch.float64)
    value = q()
    assert q.shape() == q(torch.Size()).shape == value.shape == (3, *MATRIX)
    assert q.shape((5,)) == q.rsample((5,)).shape == (5, 3, *MATRIX)
    assert (q.event_dim, q.has_enumerate_support, q.has_rsample) == (2, False, True)
    assert q.support.check(value).shape == (3,)
    close(q.mode, q.mean)
    close(q.stddev.square(), q.variance)
    mask = torch.tensor([True, False, True])
    close(q.mask(mask).log_prob(value), q.log_prob(value) * mask)
    bare = type(q).__new__(type(q))
    assert q.expand((2, 3), _instance=bare) is bare
    close(bare.log_prob(value), q.log_prob(value).expand(2, 3))


def test_modes_where_they_are_defined():
    point = torch.randn(3, 2)
    assert torch.equal(PointMass(point, 2).mode, point)
    assert ScaleMixtureNormal(torch.tensor([1.0, 0.1]), torch.tensor([0.5, 0.5])).mode == 0
    members = PointMixture(torch.randn(4, 3, 2, dtype=torch.float64))
    mixture = InducingNormal.from_inducing(make_joint((), (3, 3), torch.float64), members, 0.5)
    with pytest.raises(NotImplementedError, match="no mode in closed form"):
        _ = mixture.mode


def test_an_auxiliary_has_the_moments_and_the_support_of_its_posterior():
    q = MeanFieldNormal(torch.randn(3, 4), torch.tensor(0.5), 1)
    auxiliary = Auxiliary(q, dist.Normal(torch.zeros(3, 4), 1.0).to_event(1))
    assert torch.equal(auxiliary.mean, q.mean)
    assert torch.equal(auxiliary.stddev, q.stddev)
    value = auxiliary.rsample()
    close(auxiliary.to_event(1).log_prob(value), auxiliary.log_prob(value).sum())
