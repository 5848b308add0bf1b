"""Inducing weights that are drawn elsewhere: the two parts of the bound, and Auxiliary, add up."""

import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from pyro_structvi.distributions import Auxiliary
from tests import dense_oracles as dense
from tests.distributions.cases import INDUCING, MATRIX, joint_covariance, prior_scale
from tests.distributions.inducing.inducing_laws import WITH_KL, make
from tests.exact_means import exact_mean

SIZE = 12  # of a matrix
EVERY_LAW = pytest.mark.parametrize("law", WITH_KL.values(), ids=WITH_KL)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def own_prior(q):
    scale = prior_scale(q.joint).unsqueeze(-2).expand(q.batch_shape + MATRIX)
    return Normal(torch.zeros_like(scale), scale)


def other_prior():
    return Normal(torch.randn(MATRIX), torch.rand(MATRIX) + 0.5)


def standard_normal(*batch_shape):
    return Independent(Normal(torch.zeros(*batch_shape, *INDUCING), 1.0), 2)


# ---- the weight's part ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
@EVERY_LAW
def test_its_law_is_the_conditional_one(law, batch_shape):
    q = make(law, batch_shape=batch_shape)
    whitened = torch.randn(*batch_shape, *INDUCING)
    given = q.condition(whitened)
    gain, noise = dense.conditional_moments(joint_covariance(q.joint), SIZE)
    close(given.mean.flatten(-2), (gain @ whitened.flatten(-2).unsqueeze(-1)).squeeze(-1))
    close(given.covariance_matrix, q.conditional_scale.square()[..., None, None] * noise)


@pytest.mark.parametrize("batch_shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("sample_shape", [(), (5,)], ids=str)
def test_its_log_prob_is_the_priors_plus_a_ratio_of_conditionals(sample_shape, batch_shape):
    q = make(WITH_KL["diagonal"], batch_shape=batch_shape, bias_scale=True)
    whitened, value = (
        torch.randn(*batch_shape, *INDUCING),
        torch.randn(*sample_shape, *batch_shape, *MATRIX),
    )
    gain, noise = dense.conditional_moments(joint_covariance(q.joint), SIZE)
    mean = (gain @ whitened.flatten(-2).unsqueeze(-1)).squeeze(-1)
    rescaled = q.conditional_scale.square()[..., None, None] * noise
    flat = value.flatten(-2)
    ratio = MultivariateNormal(mean, rescaled).log_prob(flat) - MultivariateNormal(
        mean, noise
    ).log_prob(flat)
    prior = Independent(own_prior(q), 2).log_prob(value)
    close(q.condition(whitened).log_prob(value), prior + ratio)


# ---- both parts ----------------------------------------------------------------------------------


@EVERY_LAW
def test_the_two_parts_add_up_to_the_divergence_on_average(law):
    """With closed forms, and with the densities of draws, as the objectives of Pyro use them."""
    q, prior = make(law, bias_scale=True), other_prior()
    auxiliary = Auxiliary(q.inducing, standard_normal())
    expected = kl_divergence(q, prior)

    def by_divergences():
        return kl_divergence(q.condition(auxiliary.rsample()), prior) + auxiliary.kl()

    def by_densities():
        whitened = auxiliary.rsample()
        given = q.condition(whitened)
        weight = given.rsample()
        log_ratio = given.log_prob(weight) - prior.log_prob(weight).sum()
        return log_ratio + auxiliary.log_prob(whitened)

    close(exact_mean(by_divergences), expected)
    close(exact_mean(by_densities), expected)
