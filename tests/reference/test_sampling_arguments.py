"""Arguments of NUTS, and its posterior."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from numpyro.diagnostics import effective_sample_size
from scipy.stats import norm
from torch import nn

from pyro_structvi import Classifier, Regressor, bayesianize
from pyro_structvi.reference import nuts
from tests.reference.sampled_models import NUM_DATA, TINY, make_data, make_model


@pytest.fixture(scope="module")
def model():
    return make_model().float()


def assert_means(samples, expected, count):
    """Test that series ``(chain, draw, k)`` have the given means; false alarm 1e-6 in ``count``."""
    size = samples.shape[0] * samples.shape[1]
    effective = np.minimum(effective_sample_size(samples), size)
    assert (effective > 200).all()
    error = samples.std((0, 1)) / np.sqrt(effective)
    z_values = (samples.mean((0, 1)) - expected) / error
    assert np.abs(z_values).max() < norm.isf(0.5e-6 / count)


# ---- the posterior -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_posterior_of_a_linear_regression_is_the_closed_form():
    x, y = make_data(40)
    prior = {"weight": torch.tensor([0.5, 1.0, 2.0]), "bias": 0.3}
    model = Regressor(bayesianize(nn.Linear(3, 1), prior), 40, 0.5)
    draws = nuts(model, x, y, num_samples=1000, progress=False)
    design = np.column_stack([x.numpy(), np.ones(40)])
    precision = design.T @ design / 0.25 + np.diag(1 / np.array([0.5, 1, 2, 0.3]) ** 2)
    mean = np.linalg.solve(precision, design.T @ y.numpy()[:, 0] / 0.25)
    arrays = draws.grouped()
    samples = np.concatenate([arrays["net.weight"][:, :, 0], arrays["net.bias"]], axis=-1)
    # White under the posterior: means 0, products of two coordinates 0, squares 1.
    white = (samples - mean) @ np.linalg.cholesky(precision)
    rows, columns = np.tril_indices(4)
    products = white[..., rows] * white[..., columns]
    assert_means(white, 0.0, count=14)
    assert_means(products, (rows == columns).astype(float), count=14)
    assert draws.divergences == 0
    assert draws.r_hat < 1.02


@pytest.mark.slow
def test_the_posterior_of_a_classifier_is_that_of_a_grid():
    x = torch.tensor([[-1.0], [0.5], [1.0], [2.0]])
    y = torch.tensor([0, 1, 1, 0])
    model = Classifier(bayesianize(nn.Linear(1, 2, bias=False), 1.5), 4)
    draws = nuts(model, x, y, num_samples=1000, progress=False)
    axis = torch.linspace(-10, 10, 801)
    grid = torch.cartesian_prod(axis, axis)
    log_joint = -0.5 * (grid**2).sum(-1) / 1.5**2
    logits = x * grid[:, None, :]
    log_joint += logits.log_softmax(-1).gather(-1, y.expand(len(grid), 4)[..., None]).sum((1, 2))
    density = log_joint.softmax(0)
    first, second = grid.T
    moments = [(density * term).sum().item() for term in (first, second, first**2, first * second)]
    w1, w2 = np.moveaxis(draws.grouped()["net.weight"][..., 0], -1, 0)
    assert_means(np.stack([w1, w2, w1**2, w1 * w2], axis=-1), np.array(moments), count=4)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_number_of_examples_is_that_of_the_data_where_it_is_not_given():
    draws = []
    for num_data in (None, NUM_DATA):
        torch.manual_seed(0)
        model = Regressor(bayesianize(nn.Linear(3, 1), prior=1.0), num_data, 0.5)
        draws.append(nuts(model, *make_data(), num_warmup=80, num_samples=4, progress=False))
        assert model.num_data == NUM_DATA
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])


def test_a_part_of_the_data_and_too_few_draws_are_refused(model):
    x, y = make_data()
    message = "must hold all 12 training examples .*but got 5: a sampler needs all the data"
    with pytest.raises(ValueError, match=message):
        nuts(model, x[:5], y[:5])
    with pytest.raises(ValueError, match=r"`num_samples` must be at least 4, .*but got 3"):
        nuts(model, x, y, num_samples=3)
    with pytest.raises(ValueError, match=r"`y` must have shape that of the net's output = \(12, 1"):
        nuts(model, x.float(), y[:, 0].float())


class OverriddenInput(Regressor):
    def forward(self, x, y=None):
        return super().forward(2 * x, y)


class OverriddenSites(Regressor):
    def forward(self, x, y=None):
        return super().forward(x + pyro.sample("shift", dist.Normal(0.0, 1.0)), y)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OverriddenInput,
            "another model: at a draw from the prior the model's log joint is .*an over",
        ),
        (OverriddenSites, r"another model: the model's sites are \['shift', 'net\.weight', "),
    ],
)
def test_a_model_that_the_translation_misses_is_refused(kind, message):
    model = kind(bayesianize(nn.Linear(3, 1), 1.0), NUM_DATA, 0.1)
    with pytest.raises(NotImplementedError, match=message):
        nuts(model, *make_data())


@pytest.mark.gpu
def test_draws_are_on_the_device_of_the_model():
    model = make_model().cuda()
    x, y = make_data()
    draws = nuts(model, x.cuda(), y.cuda(), **TINY)
    assert all(value.is_cuda for value in draws.values())
