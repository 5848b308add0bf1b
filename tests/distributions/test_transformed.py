"""The KL of log-normals and their kin by quadrature."""

import math
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import pyro
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
from torch.distributions.transforms import ReshapeTransform

import pyro_structvi as ps
from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.extend import Family
from pyro_structvi.infer.elbo import SampledKLWarning
from pyro_structvi.structures.mean_field import TransformedNormal
from pyro_structvi.weights.site_distributions import quantiles
from pyro_structvi.weights.torch_distributions import map_tensors

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


@pytest.mark.parametrize(("scale", "most"), [(1.5, 1e-5), (2.0, 1e-4)])
def test_kl_to_a_half_cauchy_has_the_stated_error_for_wide_posteriors(scale, most):
    loc = torch.linspace(-5, 5, 21, dtype=torch.float64)
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)[:, None]
    log_value, prior = loc + scale * z, dist.HalfCauchy(1.0)
    log_q = -z.square() / 2 - math.log(scale) - math.log(2 * math.pi) / 2
    integrand = log_q.exp() * scale * (log_q - log_value - prior.log_prob(log_value.exp()))
    exact = torch.trapezoid(integrand, z, dim=0)
    for place, expected in enumerate(exact):
        own = MeanFieldNormal(loc[place : place + 1], torch.full_like(loc[:1], scale))
        q = TransformedNormal(own, [ExpTransform()])
        found = kl_divergence(q, prior.expand([1]).to_event(1))
        torch.testing.assert_close(found, expected, rtol=0, atol=most)


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


@pytest.mark.parametrize(
    "prior",
    [dist.Uniform(5.0, 10.0), dist.Uniform(300.0, 301.0), dist.Kumaraswamy(2.0, 2.0)],
    ids=str,
)
def test_an_interval_in_single_precision_has_the_kl_of_double_precision(prior):
    """In single precision far nodes lie on the bounds, where the density is zero."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        normal = MeanFieldNormal(torch.zeros(1, dtype=dtype), torch.full((1,), 1.7, dtype=dtype))
        own = map_tensors(prior, methodcaller("to", dtype))
        q = TransformedNormal(normal, [biject_to(own.support)])
        found[dtype] = kl_divergence(q, own.expand([1]).to_event(1))
    assert found[torch.float32].dtype == torch.float32
    expected = found[torch.float64].float()
    torch.testing.assert_close(found[torch.float32], expected, rtol=1e-5, atol=1e-6)


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
        (posterior(), dist.LogNormal(torch.zeros(2, 3), 1.0)),
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


def rotated():
    """Return normals on a matrix under a linear map that mixes its elements, and their covariance."""
    factor = torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    factor = torch.cat([factor, torch.tensor([[1.0, -1.0, 3.0, 1.0]])])
    mix = dist.transforms.LowerCholeskyAffine(torch.zeros(4), factor)
    base = MeanFieldNormal(torch.zeros(4), torch.ones(4))
    return dist.TransformedDistribution(base, [mix, ReshapeTransform((4,), (2, 2))])


@dataclass(frozen=True)
class Rotated(Family):
    """Standard normals under a fixed linear map."""

    needs = "a matrix (2, 2)"

    def fits(self, site):
        return site.shape == (2, 2)

    def init(self, site, loc, scale):
        return {"loc": loc.clone()}

    def distribution(self, site, *, loc):
        shift = dist.transforms.AffineTransform(loc, 1.0, event_dim=2)
        return dist.TransformedDistribution(rotated(), [shift])


def test_quantiles_are_of_elementwise_bijections():
    """A flow mixes elements, so that images of quantiles are no quantiles of its elements."""
    base, levels = MeanFieldNormal(LOC, SCALE, 2), torch.tensor([0.1, 0.8], dtype=torch.float64)
    flipped = [ReshapeTransform((2, 3), (6,)), dist.transforms.AffineTransform(1.0, -2.0)]
    found = quantiles(dist.TransformedDistribution(base, flipped), levels)
    expected = torch.distributions.Normal(1 - 2 * LOC.flatten(), 2 * SCALE.flatten())
    torch.testing.assert_close(found, expected.icdf(levels.unsqueeze(-1)))
    simplex = posterior(biject_to(constraints.simplex))
    normal = torch.distributions.Normal(LOC, SCALE).icdf(levels.reshape(-1, 1, 1))
    torch.testing.assert_close(quantiles(simplex, levels), biject_to(constraints.simplex)(normal))
    with pytest.raises(NotImplementedError):
        quantiles(rotated(), levels)


def test_a_flow_of_the_user_is_refused_where_it_has_no_closed_form():
    net = ps.bayesianize(nn.Linear(2, 2, bias=False), prior=1.0)
    model = ps.Regressor(net, 6, noise_scale=0.5)
    guide, x, y = ps.StructuredGuide(model, {"*": Rotated()}), torch.randn(6, 2), torch.randn(6, 2)
    with pytest.raises(NotImplementedError, match=r"'net.weight' has no quantiles in closed form"):
        guide.quantiles([0.5])
    with pytest.raises(
        NotImplementedError, match=r"'net.weight' has no mean and variance in closed"
    ):
        ps.predict_moments(model, guide, x)
    with pytest.warns(SampledKLWarning, match=r"weights \['net.weight'\]"):
        terms = ps.StructuredELBO(num_particles=50).terms(model, guide, x, y)
    assert terms.sampled == ("net.weight",)


@dataclass(frozen=True)
class Plain(Family):
    """A distribution of Pyro at standard arguments."""

    kind: Any
    needs = "a site"

    def fits(self, site):
        return True

    def init(self, site, loc, scale):
        return {"scale": torch.full_like(loc, 0.8)}

    def distribution(self, site, *, scale):
        return self.kind(torch.zeros_like(scale) + 0.5, scale).to_event(site.event_dim)


@pytest.mark.parametrize("kind", [dist.LogNormal, dist.Laplace, dist.Gamma, dist.Normal])
def test_medians_and_quantiles_of_distributions_of_pyro(kind):
    """The median of a log-normal is not its mean; a gamma distribution has no ``icdf``."""
    prior = dist.ImproperUniform(constraints.positive, (), (3,))
    guide = ps.StructuredGuide(lambda: pyro.sample("z", prior), {"*": Plain(kind)})
    guide.initialize()
    own = kind(torch.full((3,), 0.5), torch.full((3,), 0.8))
    if kind is dist.Gamma:
        torch.testing.assert_close(guide.median()["z"], own.mean)
        with pytest.raises(NotImplementedError, match=r"'z' has no quantiles in closed form"):
            guide.quantiles([0.5])
        return
    torch.testing.assert_close(guide.median()["z"], own.icdf(torch.tensor(0.5)))
    levels = torch.tensor([0.1, 0.8])
    torch.testing.assert_close(guide.quantiles(levels)["z"], own.icdf(levels.unsqueeze(-1)))
