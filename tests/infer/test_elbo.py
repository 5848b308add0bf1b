"""StructuredELBO: its terms, exact means and gradients beside Pyro's ELBOs, and what it refuses."""

import math
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import (
    SVI,
    Importance,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)

import pyro_structvi as ps
from pyro_structvi.distributions import InducingNormal, PointMixture
from pyro_structvi.infer import CosineDecay, LinearAnnealing, SampledKLWarning
from tests import dense_oracles as dense
from tests.conjugate import exact, full_guide, make_model
from tests.guide_cases import GUIDES, once
from tests.models import (
    hierarchical_function,
    linear_function,
    make_classifier,
    make_regressor,
    prior_only,
    recurrent_function,
    regression_data,
)
from tests.unit_noise import assert_close, exact_mean


def losses(elbo, model, guide, *args, count):
    with torch.no_grad():
        return torch.tensor([[elbo.loss(model, guide, *args)] for _ in range(count)])


def heavy_tailed(x, y=None):
    """A weight whose KL has no closed form, and a scale whose KL is computed by quadrature."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0)))
    weight = pyro.sample("weight", dist.StudentT(3.0, torch.zeros(1, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(x @ weight.mT, scale).to_event(1), obs=y)


def test_a_sampled_kl_is_said_once_by_name_at_the_users_line():
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    guide, elbo = ps.MeanFieldGuide(heavy_tailed), ps.StructuredELBO()
    with pytest.warns(SampledKLWarning, match=r"weights \['weight'\]") as caught:
        terms = elbo.terms(heavy_tailed, guide, x, y)
    assert terms.sampled == ("weight",)
    elbo.terms(heavy_tailed, guide, x, y)  # warnings are errors
    with pytest.warns(SampledKLWarning) as in_fit:
        ps.fit(heavy_tailed, guide, (x, y), num_steps=1, progress=False)
    assert [Path(warning.filename) for warning in (*caught, *in_fit)] == [Path(__file__)] * 2


# ---- particles, scales ---------------------------------------------------------------------------


def test_particles_are_averaged():
    """Ten particles have the mean of the next ten losses, with the noise that these would have."""
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    guide = ps.MeanFieldGuide(linear_function, init_scale=0.3)
    guide.initialize(x, y)
    torch.manual_seed(1)
    each = losses(ps.StructuredELBO(), linear_function, guide, x, y, count=10)
    torch.manual_seed(1)
    together = ps.StructuredELBO(10).loss(linear_function, guide, x, y)
    assert together == pytest.approx(each.mean().item())
    assert each.std() > 0.1


def test_a_scale_around_the_model_weighs_likelihood_and_kl():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=1e-8)
    plain = ps.StructuredELBO().terms(model, guide, x, y)
    scaled = ps.StructuredELBO().terms(poutine.scale(model, 0.1), guide, x, y)
    torch.testing.assert_close(scaled.kl, {name: 0.1 * value for name, value in plain.kl.items()})
    expected = 0.1 * plain.log_likelihood["obs"]
    torch.testing.assert_close(scaled.log_likelihood["obs"], expected, rtol=1e-5, atol=1e-5)
    weighed = ps.StructuredELBO(kl_weight=0.25)
    full = ps.StructuredELBO().loss(prior_only, prior := ps.MeanFieldGuide(prior_only))
    assert weighed.loss(prior_only, prior) == pytest.approx(0.25 * full)


# ---- the weight of the KL ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handler",
    [
        lambda model: poutine.scale(model, torch.linspace(0.5, 1.5, 12)),
        lambda model: poutine.mask(model, torch.arange(12) < 6),
    ],
)
@pytest.mark.parametrize("make_guide", [ps.FullCovarianceGuide, ps.MAPGuide])
def test_a_handler_for_each_example_belongs_around_the_observation(handler, make_guide):
    pyro.enable_validation(False)  # Pyro's own check of shapes comes first
    model, data = make_regressor(), regression_data()
    guide = make_guide(model)
    with pytest.raises(ValueError, match=r"'net.0.weight'.*batch shape \(\), but gives \(12,\)"):
        ps.StructuredELBO().terms(handler(model), guide, *data)


def test_schedules():
    annealing = LinearAnnealing(4, start=0.2, end=1.0)
    assert [annealing(step) for step in (0, 1, 4, 9)] == pytest.approx([0.2, 0.4, 1.0, 1.0])
    decay = CosineDecay(4, start=2.0, end=0.2)
    assert [decay(step) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.1, 0.2, 0.2])


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
    """The terms of Pyro's guide are log q - log p at its draws, as in Trace_ELBO with the same seed."""

    def model():
        pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), torch.tensor(0.5)))

    guide = pyro.infer.autoguide.AutoNormal(model)
    guide()
    torch.manual_seed(1)
    with pytest.warns(SampledKLWarning):
        ours = ps.StructuredELBO().loss(model, guide)
    torch.manual_seed(1)
    assert ours == pytest.approx(Trace_ELBO().loss(model, guide))


# ---- values and gradients ------------------------------------------------------------------------


ELBOS = [ps.StructuredELBO, TraceMeanField_ELBO, Trace_ELBO]
ENSEMBLE = "inducing weights, ensemble"


def mean_loss(elbo, model, guide, *args):
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


@pytest.mark.parametrize("guide_name", once(GUIDES))
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


@pytest.mark.parametrize("guide_name", once(name for name in GUIDES if name != ENSEMBLE))
def test_it_has_the_closed_forms_mean_by_outputs_and_by_drawn_weights(guide_name):
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    for local_reparam in (True, False):
        options = {"init_scale": 0.3, "local_reparam": local_reparam}
        guide = GUIDES[guide_name](linear_function, **options)
        guide.initialize(x, y)
        condition_well(guide)
        mean = mean_loss(ps.StructuredELBO(), linear_function, guide, x, y)
        assert_close(mean, expected_linear_loss(guide, x, y).detach())


def condition_well(guide):
    """Move inducing weights' diagonals away from 0.001, where the density of a weight loses digits."""
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            if name.endswith(("row_diagonal", "column_diagonal")):
                parameter.fill_(-0.7)


@pytest.mark.parametrize(
    "guide_name", ["k-tied", "low rank", pytest.param("inducing weights", marks=pytest.mark.slow)]
)
def test_every_elbo_has_the_closed_forms_mean_and_its_gradient(guide_name):
    x, y = torch.randn(3, 3), torch.randn(3, 2)
    guide = GUIDES[guide_name](linear_function, init_scale=0.3)
    guide.initialize(x, y)
    condition_well(guide)
    for elbo_class in ELBOS:
        exact = expected_linear_loss(guide, x, y, elbo_class)
        assert_close(mean_loss(elbo_class(), linear_function, guide, x, y), exact.detach())
        expected = flat(torch.autograd.grad(exact, list(guide.parameters())))
        assert_close(mean_gradient(elbo_class(), linear_function, guide, x, y), expected)


class RecordsTraces(ps.StructuredELBO):
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


@pytest.mark.parametrize("local_reparam", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_exact_posterior_is_the_optimum(local_reparam):
    """There the bound is the log evidence, and its gradient is zero; beside it neither."""
    data = regression_data(8)
    model, (mean, covariance, evidence) = make_model(8, 3), exact(*data)
    guide = full_guide(model, mean, covariance, local_reparam=local_reparam)
    guide.initialize(*data)
    elbo = ps.StructuredELBO()
    assert_close(mean_loss(elbo, model, guide, *data), -evidence)
    gradient = mean_gradient(elbo, model, guide, *data)
    assert_close(gradient, torch.zeros_like(gradient))
    with torch.no_grad():
        guide["net.weight"].loc.add_(0.1)
    assert mean_loss(elbo, model, guide, *data) > -evidence + 0.01
    assert mean_gradient(elbo, model, guide, *data).abs().max() > 0.1


PYROS = {
    "Trace_ELBO": Trace_ELBO(),
    "TraceGraph_ELBO": TraceGraph_ELBO(),
    "TraceEnum_ELBO": TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False),
    "RenyiELBO": RenyiELBO(alpha=0.0, num_particles=3),
    "RenyiELBO, particles in one pass": RenyiELBO(
        alpha=2.0, num_particles=3, vectorize_particles=True, max_plate_nesting=2
    ),
    "ReweightedWakeSleep": ReweightedWakeSleep(num_particles=3, max_plate_nesting=1),
}


def test_an_enumerated_site_needs_pyros_objective():
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            kind = pyro.sample("kind", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("obs", dist.Normal(x @ weight, 0.1 + kind), obs=y)

    data = torch.randn(5, 3), torch.randn(5)
    guide = ps.MeanFieldGuide(poutine.block(model, hide=["kind"]))
    assert math.isfinite(TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, *data))
    with (
        pytest.warns(UserWarning, match="in model but not guide"),
        pytest.raises(ValueError, match="Train by Pyro's `SVI` with `TraceEnum_ELBO`"),
    ):
        ps.fit(model, guide, data, num_steps=1, progress=False)


def test_draws_without_gradients_need_pyros_objective():
    """The likelihood would have no gradient at the parameters of such a posterior, in silence."""

    def model(y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        kind = pyro.sample("kind", dist.Bernoulli(torch.tensor(0.3)))
        with pyro.plate("data", len(y)):
            pyro.sample("obs", dist.Normal(weight.sum() + 2 * kind, 0.5), obs=y)

    weights = ps.MeanFieldGuide(poutine.block(model, hide=["kind"]))
    logit = torch.tensor(0.0, requires_grad=True)

    def guide(y, logit=logit):
        weights(y)
        pyro.sample("kind", dist.Bernoulli(logits=logit))

    elbo, y = ps.StructuredELBO(), torch.randn(4)
    with pytest.raises(NotImplementedError, match=r"site 'kind' .*Bernoulli.*TraceGraph_ELBO"):
        elbo.loss_and_grads(model, guide, y)
    assert math.isfinite(elbo.loss(model, guide, y))
    assert math.isfinite(elbo.loss_and_grads(model, partial(guide, logit=torch.tensor(0.0)), y))


@pytest.mark.parametrize("name", PYROS)
def test_each_draw_from_the_exact_posterior_has_the_evidence(name):
    """By every objective of Pyro and by importance sampling, since log q = log p - evidence."""
    data = regression_data(8)
    model, (mean, covariance, evidence) = make_model(8, 3), exact(*data)
    guide = full_guide(model, mean, covariance)
    loss = PYROS[name].loss(model, guide, *data)
    loss = loss[0] if isinstance(loss, tuple) else loss  # wake-sleep has a loss of the guide, too
    assert_close(torch.as_tensor(loss, dtype=torch.float64), -evidence)
    with torch.no_grad():  # torch 2.11 warns where Pyro makes numbers of its log weights
        weights = Importance(model, guide, num_samples=3).run(*data)
    assert_close(weights.get_log_normalizer(), evidence)
    assert_close(weights.get_ESS(), torch.tensor(3.0))


def test_a_plate_of_one_example_does_not_take_the_latents_of_several():
    """One observation broadcasts to all latents, in silence."""

    def model(x):
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 0.5), obs=x)

    guide, elbo = ps.MeanFieldGuide(model), ps.StructuredELBO()
    elbo.loss(model, guide, torch.zeros(6))
    with pytest.raises(ValueError, match=r"plate 'data' has size 1 .* guide has 6"):
        elbo.loss(model, guide, torch.zeros(1))
