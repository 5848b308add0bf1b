"""Several particles in one pass: the law is that of one after another."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_structvi as ps
from tests.guide_cases import GUIDES, POINTS
from tests.models import (
    hierarchical_function,
    local_latent_function,
    make_image_classifier,
    make_regressor,
    prior_only,
    regression_data,
)
from tests.statistics import assert_mean

PARTICLES = 4


def make_dense():
    return make_regressor(), regression_data()


def losses(model, guide, data, vectorize, count):
    elbo = ps.StructuredELBO(num_particles=PARTICLES, vectorize_particles=vectorize)
    with torch.no_grad():
        return torch.tensor([[elbo.loss(model, guide, *data)] for _ in range(count)])


def cases():
    fast = ("k-tied, joined", "low rank", "inducing weights", "ensemble", "dropout")
    for name in (*GUIDES, *POINTS):
        for make_model in (make_dense, make_image_classifier):
            marks = () if name in fast else pytest.mark.slow
            yield pytest.param(name, make_model, id=f"{name}-{make_model.__name__}", marks=marks)


@pytest.mark.parametrize(("guide_name", "make_model"), [*cases()])
def test_mean_and_variance_of_the_loss_are_those_of_a_loop(guide_name, make_model):
    """The variance by the squares of the deviations from the mean of all."""
    model, data = make_model()
    guide = (GUIDES | POINTS)[guide_name](model, init_scale=0.2)
    guide.initialize(*data)
    together = losses(model, guide, data, vectorize=True, count=240)
    apart = losses(model, guide, data, vectorize=False, count=80)
    center = apart.mean()
    if guide_name in ("points", "ensemble"):
        torch.testing.assert_close(together, center.expand(together.shape))
        return
    assert_mean(together - apart.repeat(3, 1), torch.zeros(1))
    ratio = (together - center).square().mean() / (apart - center).square().mean()
    assert 0.4 < ratio < 2.5


def test_gradients_are_unbiased():
    model, data = make_dense()
    guide = ps.KTiedGuide(model, init_scale=0.2)
    guide.initialize(*data)
    parameters = list(guide.parameters())

    def gradients(vectorize, count):
        elbo = ps.StructuredELBO(num_particles=PARTICLES, vectorize_particles=vectorize)
        module = elbo(model, guide)
        each = (torch.autograd.grad(module(*data), parameters) for _ in range(count))
        return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in each])

    together, apart = gradients(True, 300), gradients(False, 300)
    assert_mean(together - apart, torch.zeros(together.shape[1]))


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
@pytest.mark.parametrize("model", [hierarchical_function, local_latent_function])
def test_functions_with_other_sites_train(model):
    x, y = regression_data()
    data = (x, y) if model is hierarchical_function else (x, y[:, 0])
    guide = ps.KTiedGuide(model)
    svi = pyro.infer.SVI(
        model,
        guide,
        pyro.optim.Adam({"lr": 0.02}),
        ps.StructuredELBO(num_particles=PARTICLES, vectorize_particles=True),
    )
    history = [svi.step(*data) for _ in range(100)]
    assert sum(history[-10:]) < sum(history[:10])


def test_a_closed_form_stays_the_same_for_every_seed():
    guide = ps.MeanFieldGuide(prior_only)
    elbo = ps.StructuredELBO(num_particles=PARTICLES, vectorize_particles=True)
    values = {round(elbo.loss(prior_only, guide), 9) for _ in range(5)}
    assert len(values) == 1
    assert values.pop() == pytest.approx(ps.StructuredELBO().loss(prior_only, guide))


def test_a_sampled_divergence_is_named():
    def model():
        pyro.sample("scale", dist.Gamma(2.0, torch.tensor(1.0)))

    elbo = ps.StructuredELBO(num_particles=PARTICLES, vectorize_particles=True)
    with pytest.warns(ps.infer.SampledKLWarning, match=r"\['scale'\]"):
        terms = elbo.terms(model, ps.MeanFieldGuide(model))
    assert terms.sampled == ("scale",)


def test_scales_of_the_model_weigh():
    model, data = make_dense()
    guide = ps.MeanFieldGuide(model)
    elbo = ps.StructuredELBO(num_particles=PARTICLES, vectorize_particles=True)
    plain = elbo.terms(model, guide, *data).kl["net.0.weight"]
    scaled = elbo.terms(poutine.scale(model, scale=0.5), guide, *data).kl["net.0.weight"]
    torch.testing.assert_close(scaled, plain / 2)


def test_fit_takes_the_option():
    model, data = make_dense()
    guide = ps.KTiedGuide(model)
    options = {"num_particles": PARTICLES, "vectorize_particles": True, "progress": False}
    history = ps.fit(model, guide, data, num_steps=60, lr=0.02, **options)
    assert sum(history.elbo[-10:]) > sum(history.elbo[:10])


def test_running_statistics_and_other_guides_are_refused():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), 12, 0.3)
    elbo = ps.StructuredELBO(num_particles=2, vectorize_particles=True)
    with pytest.raises(RuntimeError, match=r"in one pass: .*`vectorize_particles=False`"):
        elbo.loss(model, ps.MeanFieldGuide(model), *regression_data())
    model, data = make_dense()
    with pytest.raises(TypeError, match="needs a StructuredGuide, but got AutoNormal"):
        elbo.loss(model, AutoNormal(model), *data)
