"""StructuredELBO: closed-form terms, unbiasedness, schedules, reports."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from scipy import integrate
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import InducingNormal, PointMixture
from pyro_structvi.infer import SampledKLWarning
from tests import dense_oracles as dense
from tests.guide_cases import GUIDE_NAMES, GUIDES
from tests.models import (
    hierarchical_function,
    linear_function,
    make_classifier,
    make_regressor,
    prior_only,
    recurrent_function,
    regression_data,
)
from tests.statistics import assert_mean


def losses(elbo, model, guide, *args, count=2000):
    with torch.no_grad():
        return torch.tensor([[elbo.loss(model, guide, *args)] for _ in range(count)])


@pytest.mark.parametrize("guide_name", GUIDES)
@pytest.mark.parametrize("elbo_class", [ps.StructuredELBO, TraceMeanField_ELBO])
def test_without_data_the_loss_is_the_same_for_every_seed(guide_name, elbo_class):
    guide = GUIDES[guide_name](prior_only, init_scale=0.7)
    guide.initialize()
    elbo, values = elbo_class(), []
    for seed in range(5):
        torch.manual_seed(seed)
        values.append(elbo.loss(prior_only, guide))
    assert max(values) - min(values) < 1e-12 * abs(values[0])
    exact = expected_kl(guide["weight"](), torch.tensor(2.0), elbo_class)
    terms = ps.StructuredELBO().terms(prior_only, guide)
    torch.testing.assert_close(terms.kl["weight"], exact)
    assert terms.log_likelihood == {}
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


@pytest.mark.parametrize("local_reparam", [True, False])
@pytest.mark.parametrize("guide_name", GUIDE_NAMES)
@pytest.mark.parametrize("elbo_class", [ps.StructuredELBO, TraceMeanField_ELBO, Trace_ELBO])
def test_every_elbo_has_the_closed_forms_mean(elbo_class, guide_name, local_reparam):
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    options = {"init_scale": 0.3, "local_reparam": local_reparam}
    guide = GUIDES[guide_name](linear_function, **options)
    guide.initialize(x, y)
    draws = losses(elbo_class(), linear_function, guide, x, y)
    assert_mean(draws, expected_linear_loss(guide, x, y, elbo_class).unsqueeze(0))


@pytest.mark.parametrize("elbo_class", [ps.StructuredELBO, TraceMeanField_ELBO, Trace_ELBO])
def test_every_elbo_has_the_closed_forms_mean_gradient(elbo_class):
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    guide = ps.KTiedGuide(linear_function, init_scale=0.3)
    guide.initialize(x, y)
    parameters = list(guide.parameters())
    exact = torch.autograd.grad(expected_linear_loss(guide, x, y), parameters)
    module = elbo_class()(linear_function_module(), guide)
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(module(x, y), parameters)])
        for _ in range(2000)
    ]
    assert_mean(torch.stack(gradients), torch.cat([g.flatten() for g in exact]))


def linear_function_module():
    class Module(nn.Module):
        def forward(self, x, y):
            return linear_function(x, y)

    return Module()


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
@pytest.mark.parametrize("elbo_class", [TraceMeanField_ELBO, Trace_ELBO])
def test_other_latent_sites_leave_every_elbo_unbiased(elbo_class):
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    guide = ps.KTiedGuide(hierarchical_function, init_scale=0.3)
    guide.initialize(x, y)
    ours = losses(ps.StructuredELBO(), hierarchical_function, guide, x, y, count=3000)
    theirs = losses(elbo_class(), hierarchical_function, guide, x, y, count=3000)
    assert_mean(ours - theirs, torch.zeros(1))


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_a_constrained_sites_kl_is_that_of_quadrature():
    def model():
        pyro.sample("scale", dist.HalfNormal(torch.tensor(2.0)))

    guide = ps.MeanFieldGuide(model, init_scale=0.4)
    guide.initialize()
    loc = guide["scale"].loc.item()
    posterior = torch.distributions.LogNormal(loc, 0.4)
    prior = torch.distributions.HalfNormal(2.0)

    def integrand(value):
        point = torch.tensor(value)
        log_q = posterior.log_prob(point)
        return float(log_q.exp() * (log_q - prior.log_prob(point)))

    exact, _ = integrate.quad(integrand, 1e-9, 30, limit=200)
    assert_mean(losses(ps.StructuredELBO(), model, guide, count=5000), torch.tensor([exact]))


def test_a_sampled_kl_is_said_once_by_name():
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    guide, elbo = ps.MeanFieldGuide(hierarchical_function), ps.StructuredELBO()
    with pytest.warns(SampledKLWarning, match=r"sites \['scale'\]"):
        terms = elbo.terms(hierarchical_function, guide, x, y)
    assert terms.sampled == ("scale",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo.terms(hierarchical_function, guide, x, y)


def test_conjugate_regression_is_recovered():
    # With orthogonal inputs the posterior factorizes, so mean field can be exact.
    x = torch.linalg.qr(torch.randn(20, 3)).Q * torch.tensor([1.0, 2.0, 3.0])
    y = x @ torch.tensor([[0.5], [-1.0], [2.0]]) + 0.2 * torch.randn(20, 1)
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1, bias=False)), num_data=20, noise_scale=0.2)
    precision = x.T @ x / 0.2**2 + torch.eye(3)
    mean, scale = torch.linalg.solve(precision, x.T @ y / 0.2**2).T, precision.diagonal().rsqrt()
    for guide in (ps.MeanFieldGuide(model), ps.KTiedGuide(model, rank=1)):
        schedule = ps.infer.CosineDecay(3000)
        ps.fit(model, guide, (x, y), num_steps=3000, lr=0.02, lr_schedule=schedule, progress=False)
        posterior = guide["net.weight"]()
        assert ((posterior.mean - mean).abs() < 0.1 * scale).all()
        torch.testing.assert_close(posterior.stddev.squeeze(0), scale, rtol=5e-2, atol=0)
        # The bound then equals the log evidence.
        covariance = x @ x.T + 0.2**2 * torch.eye(20)
        evidence = torch.distributions.MultivariateNormal(torch.zeros(20), covariance)
        bound = ps.StructuredELBO(num_particles=4000).terms(model, guide, x, y).elbo.item()
        assert bound == pytest.approx(float(evidence.log_prob(y.squeeze(-1))), abs=0.2)


def test_at_the_exact_posterior_the_bound_has_no_variance():
    # log p(y, w) - log q(w) is the log evidence for every w: Trace_ELBO on drawn weights shows it.
    x, y = torch.linalg.qr(torch.randn(20, 3)).Q, torch.randn(20, 1)
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1, bias=False)), num_data=20, noise_scale=1.0)
    guide = ps.MeanFieldGuide(model, local_reparam=False)
    with torch.no_grad():
        guide["net.weight"].loc.copy_((x.T @ y).T / 2)
        guide["net.weight"].log_scale.fill_(math.log(0.5) / 2)
    draws = losses(Trace_ELBO(), model, guide, x, y, count=20)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(20), x @ x.T + torch.eye(20))
    exact = -evidence.log_prob(y.squeeze(-1)).expand_as(draws)
    torch.testing.assert_close(draws, exact, rtol=1e-10, atol=0)


def test_particles_reduce_the_variance_and_keep_the_mean():
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    guide = ps.MeanFieldGuide(linear_function, init_scale=0.3)
    guide.initialize(x, y)
    one = losses(ps.StructuredELBO(), linear_function, guide, x, y)
    ten = losses(ps.StructuredELBO(num_particles=10), linear_function, guide, x, y, count=500)
    assert_mean(ten, expected_linear_loss(guide, x, y).unsqueeze(0))
    assert 0.05 < float(ten.var() / one.var()) < 0.2


def test_the_loss_is_scaled_to_all_data():
    model, (x, y) = make_regressor(size=120), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=1e-8)
    terms = ps.StructuredELBO().terms(model, guide, x, y)
    values = guide.median()
    mean = poutine.condition(model, values)(x)
    exact = 10 * dist.Normal(mean, 0.3).log_prob(y).sum()
    torch.testing.assert_close(terms.log_likelihood["obs"], exact, rtol=1e-5, atol=1e-5)


def test_a_scale_around_the_model_weighs_likelihood_and_kl():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=1e-8)
    plain = ps.StructuredELBO().terms(model, guide, x, y)
    scaled = ps.StructuredELBO().terms(poutine.scale(model, 0.1), guide, x, y)
    for name, value in plain.kl.items():
        torch.testing.assert_close(scaled.kl[name], 0.1 * value)
    torch.testing.assert_close(
        scaled.log_likelihood["obs"], 0.1 * plain.log_likelihood["obs"], rtol=1e-5, atol=1e-5
    )


# ---- the weight of the KL ------------------------------------------------------------------------


def test_the_schedule_follows_training_steps_only():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    elbo = ps.StructuredELBO(kl_weight=ps.LinearAnnealing(10))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=elbo)
    weights = []
    for _ in range(4):
        weights.append(elbo.current_kl_weight)
        svi.step(x, y)
        svi.evaluate_loss(x, y)
    assert weights == pytest.approx([0.0, 0.1, 0.2, 0.3])
    module = elbo(model, guide)
    module(x, y).backward()
    with torch.no_grad():
        module(x, y)
    assert elbo.current_kl_weight == pytest.approx(0.5)


def test_the_weight_multiplies_the_kl_alone():
    guide = ps.MeanFieldGuide(prior_only)
    full = ps.StructuredELBO().loss(prior_only, guide)
    assert ps.StructuredELBO(kl_weight=0.25).loss(prior_only, guide) == pytest.approx(0.25 * full)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_kl_weight_must_be_finite_and_not_negative(weight):
    with pytest.raises(ValueError, match="`kl_weight` must be a finite number of at least 0"):
        ps.StructuredELBO(kl_weight=weight)


def test_num_particles_must_be_positive():
    with pytest.raises(
        ValueError, match="`num_particles` must be a whole number of at least 1, but got 0"
    ):
        ps.StructuredELBO(num_particles=0)


# ---- what is evaluated, and what is refused ------------------------------------------------------


def test_no_log_prob_of_a_latent_is_evaluated(monkeypatch):
    model, (x, y) = make_classifier(), (torch.randn(6, 3), torch.randint(4, (6,)))
    guide = ps.KTiedGuide(model)
    guide.initialize(x, y)

    def refuse(*args):
        raise AssertionError("a latent site's log_prob was evaluated")

    for kind in (ps.distributions.KTiedNormal, ps.distributions.MeanFieldNormal, dist.Normal):
        monkeypatch.setattr(kind, "log_prob", refuse)
    assert math.isfinite(ps.StructuredELBO().loss_and_grads(model, guide, x, y))


def test_a_latent_missing_in_the_guide_is_an_error():
    guide = ps.MeanFieldGuide(recurrent_function)
    x = torch.zeros(2, 3)
    guide.initialize(x, torch.zeros(2))

    def larger(x, y):
        recurrent_function(x, y)
        pyro.sample("extra", dist.Normal(0.0, 1.0))

    with (
        pytest.warns(UserWarning, match="in model but not guide"),
        pytest.raises(ValueError, match="latent site 'extra' is missing in the guide"),
    ):
        ps.StructuredELBO().loss(larger, guide, x, torch.zeros(2))


def test_auxiliary_sites_of_a_guide_enter():
    def model():
        pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), torch.tensor(0.5)))

    guide = pyro.infer.autoguide.AutoNormal(model)
    elbo = ps.StructuredELBO()
    with pytest.warns(SampledKLWarning):
        ours = losses(elbo, model, guide, count=3000)
    assert_mean(ours - losses(Trace_ELBO(), model, guide, count=3000), torch.zeros(1))


def test_it_works_as_a_module_with_any_optimizer():
    model, (x, y) = make_regressor(), regression_data()
    module = ps.StructuredELBO()(model, ps.KTiedGuide(model))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    first = module(x, y).item()
    for _ in range(200):
        optimizer.zero_grad()
        module(x, y).backward()
        optimizer.step()
    assert module(x, y).item() < first
