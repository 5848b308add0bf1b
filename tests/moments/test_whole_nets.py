"""Ensembles, mini-batches, training, and whole nets by moments against draws."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import StructuredELBO
from tests.moments.one_layer import SIZE, fitted, linear, spread_out

# ---- ensembles, mini-batches, training -----------------------------------------------------------


def test_an_ensemble_is_the_mixture_of_its_members(x):
    """As with draws of all members, each once."""
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), prior=1.0)
    model, y = ps.Classifier(net, SIZE), torch.tensor([0, 1, 2, 0, 1])
    guide = spread_out(ps.EnsembleGuide(model, size=3), x, y)
    found = ps.predict_moments(model, guide, x, y=y)
    expected = ps.predict(model, guide, x, num_samples=3, y=y)
    for name in ("mean", "variance", "function_variance", "entropy", "log_density"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    torch.testing.assert_close(found.mutual_information, expected.mutual_information)


def test_mini_batches_and_parts_of_them_change_nothing(x, monkeypatch):
    model, y = ps.Regressor(linear(), SIZE, noise="learned"), torch.randn(SIZE, 2)
    guide = fitted(model)
    whole = ps.predict_moments(model, guide, x, y=y, covariance="full")
    monkeypatch.setattr("pyro_structvi.posterior.one_pass.LARGEST", 4)
    parts = ps.predict_moments(model, guide, x, y=y, covariance="full", batch_size=3)
    for name in ("mean", "variance", "function_variance", "log_density"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))
    assert (whole.num_samples, whole.functions) == (0, None)


def test_the_bound_is_the_limit_of_bounds_by_draws(x):
    """A z-test with 200 draws, with false alarms of one in a million beside the error of the points."""
    model, y = ps.Classifier(linear(3), SIZE), torch.tensor([0, 1, 2, 0, 1])
    guide = fitted(model)
    exact = StructuredELBO(estimator="moments").loss(model, guide, x, y)
    assert StructuredELBO(estimator="moments").loss(model, guide, x, y) == exact
    elbo = StructuredELBO()
    with torch.no_grad():
        draws = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(200)])
    assert abs(draws.mean() - exact) < 4.9 * draws.std() / 200**0.5 + 2e-3 * abs(exact)


def test_fit_goes_to_the_exact_posterior_of_a_linear_model():
    """Without noise in the gradient the bound reaches the evidence under a full covariance."""
    x = torch.randn(12, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 * torch.randn(12, 1)
    net = ps.bayesianize(nn.Linear(2, 1), prior=1.0)
    model = ps.Regressor(net, 12, 0.3)
    guide = ps.FullCovarianceGuide(model)
    elbo = ps.StructuredELBO(estimator="moments")
    history = ps.fit(model, guide, (x, y), num_steps=100, lr=0.1, elbo=elbo, progress=False)
    design = F.pad(x, (0, 1), value=1.0)
    evidence = dist.MultivariateNormal(
        torch.zeros(12), design @ design.mT + 0.09 * torch.eye(12)
    ).log_prob(y.squeeze())
    assert history.elbo[-1] <= evidence + 1e-6
    found = ps.predict_moments(model, guide, x)
    precision = torch.linalg.inv(design.mT @ design / 0.09 + torch.eye(3))
    exact = design @ precision @ design.mT @ y / 0.09
    assert (found.mean - exact).abs().max() < 0.05


# ---- whole nets against draws --------------------------------------------------------------------


def mlp(activation):
    layers = [nn.Linear(3, 20), activation, nn.Linear(20, 20), activation, nn.Linear(20, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


def lenet():
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU()]
    layers += [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


NETS = {
    "relu": (lambda: mlp(nn.ReLU()), (3,)),
    "tanh": (lambda: mlp(nn.Tanh()), (3,)),
    "LeNet": (lenet, (1, 10, 10)),
}


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("name", NETS)
def test_moments_of_whole_nets_are_near_those_of_draws(name, covariance):
    """Means to a fifth of a standard deviation, and standard deviations to a third.

    An approximation: outputs of a layer count as normal, and as independent if only variances are kept.
    """
    make, shape = NETS[name]
    model, x = ps.Regressor(make(), SIZE, 0.1), torch.randn(SIZE, *shape)
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    guide(x)
    found = ps.predict_moments(model, guide, x, covariance=covariance)
    drawn = ps.predict(model, guide, x, num_samples=1500)
    scale = drawn.function_variance.sqrt()
    assert ((found.mean - drawn.mean).abs() / scale).max() < 0.2
    assert (found.function_variance.sqrt() / scale - 1).abs().max() < 0.33
