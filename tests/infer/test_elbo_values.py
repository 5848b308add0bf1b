"""StructuredELBO and Pyro's ELBOs: their terms, exact means and gradients, and where the optimum is."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import InducingNormal, PointMixture
from tests import dense_oracles as dense
from tests.exact_means import exact_mean
from tests.guide_cases import GUIDES
from tests.models import hierarchical_function, linear_function, prior_only
from tests.unit_noise import assert_close

ELBOS = [ps.StructuredELBO, TraceMeanField_ELBO, Trace_ELBO]
ENSEMBLE = "inducing weights, ensemble"


def mean_loss(elbo, model, guide, *args):
    """Return the exact mean of a loss that is quadratic in its noise."""
    with torch.no_grad():
        return exact_mean(lambda: torch.as_tensor(elbo.differentiable_loss(model, guide, *args)))


def mean_gradient(elbo, model, guide, *args):
    parameters = list(guide.parameters())

    def gradient():
        loss = elbo.differentiable_loss(model, guide, *args)
        return flat(torch.autograd.grad(loss, parameters))

    return exact_mean(gradient)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("guide_name", GUIDES)
def test_without_data_the_loss_is_the_same_for_every_seed(guide_name):
    guide = GUIDES[guide_name](prior_only, init_scale=0.7)
    guide.initialize()
    terms = ps.StructuredELBO().terms(prior_only, guide)
    assert terms.log_likelihood == {}
    for elbo_class in (ps.StructuredELBO, TraceMeanField_ELBO):
        values = []
        for seed in range(3):
            torch.manual_seed(seed)
            values.append(elbo_class().loss(prior_only, guide))
        assert max(values) - min(values) < 1e-12 * abs(values[0])
        exact = expected_kl(guide["weight"](), torch.tensor(2.0), elbo_class)
        torch.testing.assert_close(terms.kl["weight"], exact)
        assert values[0] == pytest.approx(-terms.elbo.item())


def expected_kl(q, prior_scale, elbo_class=ps.StructuredELBO):
    """Return the KL from N(0, prior_scale^2), as an objective counts it.

    With inducing weights it is the one over them too, where the objective asks for a closed form. Their
    own part is zero for an ensemble, whose members are points.
    """
    ensemble = isinstance(q, InducingNormal) and isinstance(q.inducing, PointMixture)
    if not isinstance(q, InducingNormal) or (elbo_class is Trace_ELBO and not ensemble):
        return dense_kl(q, prior_scale)
    scale = q.conditional_scale
    noise = q.event_shape.numel() * (scale.square() / 2 - scale.log() - 0.5)
    return noise if ensemble else noise + dense_kl(q.inducing, torch.tensor(1.0))


def dense_kl(q, prior_scale):
    moments = q.mean, q.covariance_matrix
    return dense.kl_to_independent_normals(*moments, torch.zeros(()), prior_scale, event_dim=2)


def expected_linear_loss(guide, x, y, elbo_class=ps.StructuredELBO):
    """The bound of a linear model with known noise 0.5, in closed form."""
    q = guide["weight"]()
    mean = x @ q.mean.T
    variance = dense.image_covariance(x, q.covariance_matrix, 2).diagonal(dim1=-2, dim2=-1)
    likelihood = dist.Normal(mean, 0.5).log_prob(y).sum() - (variance / 0.5**2).sum() / 2
    return expected_kl(q, torch.ones(()), elbo_class) - likelihood


@pytest.mark.parametrize("guide_name", [name for name in GUIDES if name != ENSEMBLE])
def test_every_elbo_has_the_closed_forms_mean(guide_name):
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    for elbo_class, local_reparam in (*((each, True) for each in ELBOS), (ELBOS[0], False)):
        options = {"init_scale": 0.3, "local_reparam": local_reparam}
        guide = GUIDES[guide_name](linear_function, **options)
        guide.initialize(x, y)
        condition_well(guide)
        mean = mean_loss(elbo_class(), linear_function, guide, x, y)
        expected = expected_linear_loss(guide, x, y, elbo_class).detach()
        assert_close(mean, expected)


def condition_well(guide):
    """Move inducing weights' diagonals away from 0.001, where the density of a weight loses digits."""
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            if name.endswith(("row_diagonal", "column_diagonal")):
                parameter.fill_(-0.7)


@pytest.mark.parametrize("guide_name", ["k-tied", "low rank", "inducing weights"])
def test_every_elbo_has_the_closed_forms_mean_gradient(guide_name):
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    guide = GUIDES[guide_name](linear_function, init_scale=0.3)
    guide.initialize(x, y)
    condition_well(guide)
    for elbo_class in ELBOS:
        exact = expected_linear_loss(guide, x, y, elbo_class)
        expected = flat(torch.autograd.grad(exact, list(guide.parameters())))
        assert_close(mean_gradient(elbo_class(), linear_function, guide, x, y), expected)


class RecordsTraces(ps.StructuredELBO):
    """The objective, with the traces of its last pass at hand."""

    def _get_trace(self, *args):
        self.model_trace, self.guide_trace = super()._get_trace(*args)
        return self.model_trace, self.guide_trace


def test_terms_of_other_latent_sites_are_those_of_their_draws():
    """At its draws each term is a number that can be computed by hand."""
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    guide = ps.KTiedGuide(hierarchical_function, init_scale=0.3, local_reparam=False)
    elbo = RecordsTraces()
    terms = elbo.terms(hierarchical_function, guide, x, y)
    nodes = elbo.guide_trace.nodes
    scale, weight, noise = (nodes[name]["value"] for name in ("scale", "weight", "noise"))
    kl = {
        "scale": half_normal_kl(guide["scale"]),
        "weight": dense_kl(guide["weight"](), scale),
        "noise": normal_kl(guide["noise"], -1.0, 0.5),
    }
    torch.testing.assert_close(terms.kl, kl)
    likelihood = dist.Normal(x @ weight.mT, noise).log_prob(y).sum()
    torch.testing.assert_close(terms.log_likelihood["obs"], likelihood)


def half_normal_kl(posterior):
    """E[log q - log p] of a log-normal against HalfNormal(1), in closed form."""
    loc, scale = posterior.loc, posterior.log_scale.exp()
    square = (2 * loc + 2 * scale.square()).exp()
    entropy = loc + scale.log() + 0.5 * math.log(2 * math.pi * math.e)
    return (square / 2 + 0.5 * math.log(math.pi / 2) - entropy).sum()


def normal_kl(posterior, loc, scale):
    q = torch.distributions.Normal(posterior.loc, posterior.log_scale.exp())
    return torch.distributions.kl_divergence(q, torch.distributions.Normal(loc, scale)).sum()


# ---- at the exact posterior ----------------------------------------------------------------------


def conjugate_regression(x):
    """Return a linear model with noise 0.2, data, the posterior's mean and covariance, the evidence."""
    y = x @ torch.tensor([[0.5], [-1.0], [2.0]]) + 0.2 * torch.randn(len(x), 1)
    net = ps.bayesianize(nn.Linear(3, 1, bias=False))
    model = ps.Regressor(net, num_data=len(x), noise_scale=0.2)
    precision = x.T @ x / 0.2**2 + torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ y / 0.2**2).T
    marginal = x @ x.T + 0.2**2 * torch.eye(len(x))
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(x)), marginal)
    return model, (x, y), mean, precision.inverse(), evidence.log_prob(y.squeeze(-1))


def set_full(posterior, mean, covariance):
    tril = torch.linalg.cholesky(covariance)
    posterior.loc.copy_(mean)
    posterior.log_diagonal.copy_(tril.diagonal().log())
    multiples = tril / tril.diagonal().unsqueeze(-1)
    posterior.lower.copy_(multiples[tuple(torch.tril_indices(3, 3, -1))])


@pytest.mark.parametrize("local_reparam", [True, False])
def test_the_exact_posterior_is_the_optimum(local_reparam):
    """There the bound is the log evidence, and its gradient is zero; beside it neither."""
    model, data, mean, covariance, evidence = conjugate_regression(torch.randn(8, 3))
    guide = ps.FullCovarianceGuide(model, local_reparam=local_reparam)
    guide.initialize(*data)
    with torch.no_grad():
        set_full(guide["net.weight"], mean, covariance)
    elbo = ps.StructuredELBO()
    assert_close(mean_loss(elbo, model, guide, *data), -evidence)
    gradient = mean_gradient(elbo, model, guide, *data)
    assert_close(gradient, torch.zeros_like(gradient))
    with torch.no_grad():
        guide["net.weight"].loc.add_(0.1)
    assert mean_loss(elbo, model, guide, *data) > -evidence + 0.01
    assert mean_gradient(elbo, model, guide, *data).abs().max() > 0.1
