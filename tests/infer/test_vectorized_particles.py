"""Several particles in one pass: with the same noise, the numbers are those of a loop."""

import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import elbo as elbo_module
from tests.guide_cases import GUIDES, POINTS, once
from tests.models import (
    hierarchical_function,
    local_latent_function,
    make_image_classifier,
    make_regressor,
    regression_data,
)
from tests.particle_noise import terms_in_a_loop, terms_together

PARTICLES = 4


def make_dense():
    return make_regressor(), regression_data()


def vectorized(count=PARTICLES):
    return ps.StructuredELBO(num_particles=count, vectorize_particles=True)


def assert_together_is_a_loop(model, guide, data):
    """Compare terms and gradients of one pass with those of a loop, for the same noise."""
    guide.initialize(*data)
    parameters, found = list(guide.parameters()), []
    for terms_of in (terms_together, terms_in_a_loop):
        terms = terms_of(vectorized(), model, guide, *data)
        found.append((terms, torch.autograd.grad(terms.elbo, parameters)))
    (terms, gradients), (expected, expected_gradients) = found
    torch.testing.assert_close(terms.log_likelihood, expected.log_likelihood)
    torch.testing.assert_close(terms.kl, expected.kl)
    assert terms.sampled == expected.sampled
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-9, atol=1e-9)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("guide_name", once([*GUIDES, *POINTS]))
def test_terms_and_gradients_are_those_of_a_loop(guide_name):
    for make_model in (make_dense, make_image_classifier):
        model, data = make_model()
        guide = (GUIDES | POINTS)[guide_name](model, init_scale=0.2)
        assert_together_is_a_loop(model, guide, data)


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
@pytest.mark.parametrize("model", [hierarchical_function, local_latent_function])
def test_so_are_those_of_functions_with_other_sites(model):
    x, y = regression_data()
    data = (x, y) if model is hierarchical_function else (x, y[:, 0])
    assert_together_is_a_loop(model, ps.KTiedGuide(model, init_scale=0.2), data)


def test_fit_takes_the_option(monkeypatch):
    model, data = make_dense()
    counts, together = [], elbo_module._run_together
    monkeypatch.setattr(
        elbo_module,
        "_run_together",
        lambda run, numbers: counts.append(len(numbers)) or together(run, numbers),
    )
    options = {"elbo": vectorized(), "progress": False}
    ps.fit(model, ps.KTiedGuide(model), data, num_steps=3, **options)
    assert counts == 3 * [PARTICLES]


def test_running_statistics_and_other_guides_are_refused():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), 12, 0.3)
    with pytest.raises(RuntimeError, match=r"in one pass: .*`vectorize_particles=False`"):
        vectorized().loss(model, ps.MeanFieldGuide(model), *regression_data())
    model, data = make_dense()
    with pytest.raises(TypeError, match="needs a StructuredGuide, but got AutoNormal"):
        vectorized().loss(model, AutoNormal(model), *data)
