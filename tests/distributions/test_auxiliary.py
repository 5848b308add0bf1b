"""Auxiliary guide variables, scored against the prior they were given or by themselves."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from pyro_structvi.distributions import Auxiliary, MeanFieldNormal

LOC = torch.tensor([0.3, -1.2, 0.5], dtype=torch.float64)


def make(with_prior):
    prior = Normal(torch.zeros_like(LOC), 2 * torch.ones_like(LOC)) if with_prior else None
    posterior = MeanFieldNormal(LOC, torch.tensor(0.7, dtype=torch.float64))
    return Auxiliary(
        posterior, None if prior is None else torch.distributions.Independent(prior, 1)
    )


def test_it_is_scored_against_its_prior():
    q, value = make(with_prior=True), torch.randn(4, 3, dtype=torch.float64)
    expected = q.posterior.log_prob(value) - q.prior.log_prob(value)
    torch.testing.assert_close(q.log_prob(value), expected)
    torch.testing.assert_close(q.kl(), kl_divergence(q.posterior, q.prior))


def test_without_a_prior_it_counts_its_entropy():
    q, value = make(with_prior=False), torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(value), q.posterior.log_prob(value))
    torch.testing.assert_close(q.kl(), -q.posterior.entropy())


@pytest.mark.parametrize("with_prior", [True, False])
def test_expand_keeps_the_prior(with_prior):
    q, value = make(with_prior), torch.randn(2, 3, dtype=torch.float64)
    expanded = q.expand(torch.Size([2]))
    assert expanded.batch_shape == (2,)
    assert (expanded.prior is not None) == with_prior
    torch.testing.assert_close(expanded.log_prob(value), q.log_prob(value))
