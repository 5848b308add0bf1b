"""The KL of log-normals and their kin by quadrature."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import (
    ComposeTransform,
    ExpTransform,
    biject_to,
    constraints,
    kl_divergence,
)

import pyro_structvi as ps
from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.structures.mean_field import TransformedNormal

LOC = torch.tensor([[0.3, -1.0, 0.1], [0.0, 0.5, -0.4]], dtype=torch.float64)
SCALE = torch.tensor([[0.01, 0.3, 1.0], [0.1, 0.6, 0.8]], dtype=torch.float64)


def posterior(transform=None, event_dim=2):
    normal = MeanFieldNormal(LOC, SCALE, event_dim)
    return TransformedNormal(normal, [transform or ExpTransform()])


def by_trapezoids(q, log_density):
    """Integrate log q - log p over each element, on a grid whose error is below rounding."""
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64).reshape(-1, 1, 1)
    value = LOC + SCALE * z
    for transform in q.transforms:
        value = transform(value)
    normal = torch.distributions.Normal(LOC, SCALE)
    own = torch.distributions.TransformedDistribution(normal, q.transforms, validate_args=False)
    weights = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    integrand = weights * (own.log_prob(value) - log_density(value))
    return torch.trapezoid(integrand, z, dim=0)


PRIORS = {
    "half-normal": lambda: dist.HalfNormal(0.7),
    "gamma": lambda: dist.Gamma(2.0, 3.0),
    "inverse gamma": lambda: dist.InverseGamma(2.0, 1.0),
    "log-normal": lambda: dist.LogNormal(0.2, 2.0),
    "half-Cauchy": lambda: dist.HalfCauchy(1.0),
    "exponential": lambda: dist.Exponential(2.0),
}


@pytest.mark.parametrize("name", PRIORS)
def test_kl_to_positive_priors_is_the_integral(name):
    prior = PRIORS[name]()
    q = posterior()
    exact = by_trapezoids(q, prior.log_prob)
    tolerance = 3e-8 if name == "half-Cauchy" else 1e-9
    for p in (
        prior.expand([2, 3]).to_event(2),
        dist.ExpandedDistribution(prior, [2, 3]).to_event(2),
    ):
        found = kl_divergence(q, p)
        torch.testing.assert_close(found, exact.sum(), rtol=tolerance, atol=tolerance)
    rows = kl_divergence(posterior(event_dim=1), prior.expand([2, 3]).to_event(1))
    torch.testing.assert_close(rows, exact.sum(-1), rtol=tolerance, atol=tolerance)


def test_arguments_of_the_prior_broadcast_and_other_bijections_serve():
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    interval = biject_to(constraints.interval(-1.0, 3.0))
    for q, prior, tolerance in (
        (posterior(), dist.HalfNormal(scales), 1e-9),
        (posterior(interval), dist.Uniform(-1.0, 3.0), 1e-6),
    ):
        found = kl_divergence(q, prior.expand([2, 3]).to_event(2))
        exact = by_trapezoids(q, prior.log_prob).sum()
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)


def test_one_bijection_cancels():
    shared = ComposeTransform([ExpTransform()])
    q = posterior(shared)
    prior = dist.Normal(torch.zeros(2, 3), 2.0).to_event(2)
    p = torch.distributions.TransformedDistribution(prior, [shared])
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(q.base_dist, prior))


def test_gradients_are_those_of_the_closed_form():
    loc, scale = LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()
    q = TransformedNormal(MeanFieldNormal(loc, scale), [ExpTransform()])
    kl_divergence(q, dist.HalfNormal(0.7).expand([2, 3]).to_event(2)).backward()
    square = (2 * LOC + 2 * SCALE.square()).exp() / 0.7**2
    torch.testing.assert_close(loc.grad, square - 1, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scale.grad, 2 * SCALE * square - 1 / SCALE, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("q", "p"),
    [
        (posterior(), dist.HalfNormal(1.0).expand([2, 3]).to_event(1)),
        (posterior(biject_to(constraints.simplex)), dist.Dirichlet(torch.ones(4)).expand([2])),
    ],
)
def test_elements_that_depend_on_each_other_have_no_kl(q, p):
    with pytest.raises(NotImplementedError):
        kl_divergence(q, p)


def test_the_kl_of_a_vector_of_scales_is_the_sum_of_those_of_its_elements():
    def divergence(prior):
        model = ps.Regressor(ps.bayesianize(nn.Linear(3, prior.shape().numel())), 6, noise=prior)
        guide, y = ps.MeanFieldGuide(model, init_scale=0.3), torch.zeros(6, prior.shape().numel())
        return ps.StructuredELBO().terms(model, guide, torch.randn(6, 3), y).kl["noise_scale"]

    each = [divergence(dist.HalfNormal(torch.tensor([scale]))) for scale in (0.5, 1.0)]
    single = divergence(dist.HalfNormal(1.0))
    together = divergence(dist.HalfNormal(torch.tensor([0.5, 1.0])))
    torch.testing.assert_close(together, sum(each), rtol=1e-10, atol=0)
    torch.testing.assert_close(each[1], single, rtol=1e-10, atol=0)
