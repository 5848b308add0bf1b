"""The KL to independent Laplace priors, by quadrature of marginals and dense entropies."""

import itertools
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate
from torch.distributions import Independent, Laplace, Normal, kl_divergence

from pyro_structvi.distributions import (
    BernoulliDropout,
    JoinedPrior,
    MeanFieldNormal,
    PointMass,
    PrunedNormal,
)
from pyro_structvi.weights.site_distributions import expected_neg_log_prob
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, VECTOR
from tests.distributions.inducing.inducing_laws import MIXTURES, make

SHAPE = (4, 3)


def make_prior(kind, shape):
    return kind(torch.randn(shape), torch.rand(shape) + 0.5)


def expected_by_quadrature(mean, variance, prior):
    """Return ``E[-log p(w)]`` of one element, with the prior's kink at a limit of the integral."""
    mean, scale = float(mean), math.sqrt(variance)
    loc, prior_scale = float(prior.loc), float(prior.scale)

    def integrand(w):
        density = math.exp(-0.5 * ((w - mean) / scale) ** 2) / (scale * math.sqrt(2 * math.pi))
        if isinstance(prior, Laplace):
            return density * (math.log(2 * prior_scale) + abs(w - loc) / prior_scale)
        constant = math.log(prior_scale * math.sqrt(2 * math.pi))
        return density * (constant + 0.5 * ((w - loc) / prior_scale) ** 2)

    low, high = mean - 12 * scale, mean + 12 * scale
    limits = [low, *np.clip([loc], low, high), high]
    parts = (integrate.quad(integrand, *ends) for ends in itertools.pairwise(limits))
    return sum(value for value, _ in parts)


def sum_by_quadrature(mean, variance, prior):
    loc, scale = (value.expand(mean.shape).flatten() for value in (prior.loc, prior.scale))
    elements = zip(mean.flatten(), variance.flatten(), loc, scale, strict=True)
    kind = type(prior)
    return torch.tensor(sum(expected_by_quadrature(m, v, kind(a, b)) for m, v, a, b in elements))


def expected_kl(case, q, *priors_of_parts):
    """Return the KL from quadrature and dense covariances, for parts ``(columns, prior)``."""
    mean, covariance = case.mean(q), case.covariance(q)
    variance = covariance.diagonal().reshape(mean.shape)
    energy = sum(
        sum_by_quadrature(mean[..., columns], variance[..., columns], prior)
        for columns, prior in priors_of_parts
    )
    if case.kl_with_inducing is None:
        return energy - dense.entropy(covariance)
    # With inducing weights: that to a normal, less the part of the normal.
    zeros, ones = torch.zeros(mean.shape), torch.ones(mean.shape)
    return energy + case.kl(q, zeros, ones) - sum_by_quadrature(mean, variance, Normal(zeros, ones))


CLOSED = [case for case in CASES if case.name in {"low rank 2", "inducing weights, full"}]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_structure_has_the_kl_of_quadrature(case):
    q = case.make((), SHAPE, torch.float64)
    for form in (SHAPE, (), (4, 1)) if case in CLOSED else (SHAPE,):
        prior = make_prior(Laplace, form)
        divergence = kl_divergence(q, Independent(prior.expand(SHAPE), 2))
        torch.testing.assert_close(divergence, expected_kl(case, q, (slice(None), prior)))


def test_a_vector_and_a_batch():
    q = CASES[0].make((2,), VECTOR, torch.float64)
    prior = make_prior(Laplace, (2, *VECTOR))
    exact = [
        sum_by_quadrature(q.mean[k], q.variance[k], Laplace(prior.loc[k], prior.scale[k]))
        for k in range(2)
    ]
    entropy = dense.entropy(q.covariance_matrix)
    torch.testing.assert_close(kl_divergence(q, prior), torch.stack(exact) - entropy)


@pytest.mark.parametrize("case", CLOSED, ids=lambda case: case.name)
def test_a_weight_and_its_bias_may_have_priors_of_two_kinds(case):
    q = case.make((), (4, 4), torch.float64)
    for kinds in ((Laplace, Normal), (Normal, Laplace), (Laplace, Laplace)):
        weight, bias = make_prior(kinds[0], SHAPE), make_prior(kinds[1], (4,))
        joined = JoinedPrior(Independent(weight, 2), Independent(bias, 1))
        parts = (slice(3), weight), (3, bias)
        torch.testing.assert_close(kl_divergence(q, joined), expected_kl(case, q, *parts))


def test_a_joined_convolution_is_seen_as_a_matrix():
    q = CASES[0].make((), (4, 7), torch.float64)
    weight, bias = make_prior(Laplace, (4, 3, 2)), make_prior(Normal, (4,))
    joined = JoinedPrior(Independent(weight, 3), Independent(bias, 1))
    flat = Laplace(weight.loc.reshape(4, 6), weight.scale.reshape(4, 6))
    parts = (slice(6), flat), (6, bias)
    torch.testing.assert_close(kl_divergence(q, joined), expected_kl(CASES[0], q, *parts))


def test_pruned_elements_are_left_out():
    kept, prior = torch.rand(SHAPE) < 0.5, make_prior(Laplace, SHAPE)
    q = PrunedNormal(torch.randn(SHAPE), torch.rand(SHAPE) + 0.1, kept)
    left = MeanFieldNormal(q.loc[kept], q.scale[kept])
    exact = kl_divergence(left, Laplace(prior.loc[kept], prior.scale[kept]))
    torch.testing.assert_close(kl_divergence(q, prior), exact)
    half = JoinedPrior(Independent(Normal(torch.zeros(4, 2), 1.0), 2), Laplace(torch.zeros(4), 1.0))
    assert torch.isfinite(kl_divergence(q, half))


def test_points_with_moments():
    mean, variance = torch.randn(3), torch.tensor([0.3, 1.0, 0.0])
    prior = make_prior(dist.Laplace, (3,))
    q = PointMass(mean, 1, mean, variance)
    exact = sum_by_quadrature(mean[:2], variance[:2], Laplace(prior.loc[:2], prior.scale[:2]))
    exact = exact - prior.log_prob(mean)[2]
    torch.testing.assert_close(kl_divergence(q, prior.to_event(1)), exact)


def test_dropout_joined_with_a_bias():
    q = BernoulliDropout(torch.randn(4, 4), rate=0.3)
    prior = JoinedPrior(make_prior(Laplace, SHAPE), make_prior(Normal, (4,)))
    masks = torch.cartesian_prod(*(torch.tensor([0.0, 1.0]) for _ in range(4)))
    probabilities = torch.where(masks > 0, 0.7, 0.3).prod(-1)
    energies = torch.stack([-prior.log_prob(q.loc * mask / 0.7) for mask in masks])
    exact = (probabilities * energies).sum() - q.entropy()
    torch.testing.assert_close(kl_divergence(q, prior), exact)


def test_a_mixture_of_normals_is_no_normal():
    weight, bias = Laplace(torch.zeros(SHAPE), 1.0), Normal(torch.zeros(4), 1.0)
    for law in MIXTURES.values():
        with pytest.raises(NotImplementedError):
            kl_divergence(make(law), weight)
        with pytest.raises(NotImplementedError):
            kl_divergence(make(law, event_shape=(4, 4)), JoinedPrior(weight, bias))


@pytest.mark.parametrize("difference", [0.0, 1e-3, -0.7, 30.0])
def test_gradients_are_those_of_finite_differences(difference):
    def divergence(mean, scale, loc, prior_scale):
        q = MeanFieldNormal(mean, scale, validate_args=False)
        return kl_divergence(q, Laplace(loc, prior_scale, validate_args=False))

    loc = torch.randn(3)
    arguments = loc + difference, torch.rand(3) + 0.5, loc, torch.rand(3) + 0.5
    arguments = tuple(value.clone().requires_grad_() for value in arguments)
    assert torch.autograd.gradcheck(divergence, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_for_a_spread_of_nothing(dtype):
    differences, scales = [0.0, 1e-16, 1e-6, -1.0, 1e6], [0.0, 1e-30, 1e-18, 1e-12, 1e-3, 1e6]
    prior = Laplace(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    for scale, difference in itertools.product(scales, differences):
        mean, spread = (
            torch.tensor(value, dtype=dtype, requires_grad=True) for value in (difference, scale)
        )
        nats = expected_neg_log_prob(mean, spread.square(), prior)
        of_mean, of_spread = torch.autograd.grad(nats, [mean, spread])
        assert torch.isfinite(of_spread)
        erf = math.erf(difference / max(scale, 1e-100) / math.sqrt(2))
        assert of_mean.item() == pytest.approx(erf, abs=1e-6)
        if scale <= 1e-12:
            assert nats.item() == pytest.approx(math.log(2) + abs(difference), rel=1e-6)
