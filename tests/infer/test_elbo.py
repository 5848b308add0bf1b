"""StructuredELBO: particles, schedules, scales, what is evaluated and what is refused."""

import math
from pathlib import Path

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay, LinearAnnealing, SampledKLWarning
from tests.models import (
    linear_function,
    make_classifier,
    make_regressor,
    prior_only,
    recurrent_function,
    regression_data,
)


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
    together = ps.StructuredELBO(num_particles=10).loss(linear_function, guide, x, y)
    assert together == pytest.approx(each.mean().item())
    assert each.std() > 0.1


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
