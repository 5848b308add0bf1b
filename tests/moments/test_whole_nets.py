"""Ensembles, mini-batches, and whole nets by moments against draws."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.moments.one_layer import SIZE, fitted, linear, spread_out


def test_an_ensemble_is_the_mixture_of_its_members(x):
    """As with draws of all members, each once."""
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), prior=1.0)
    model, y = ps.Classifier(net, SIZE), torch.tensor([0, 1, 2, 0, 1])
    guide = spread_out(ps.EnsembleGuide(model, size=3), x, y)
    found = ps.predict_moments(model, guide, x, y=y)
    expected = ps.predict(model, guide, x, num_samples=3, y=y)
    fields = ("mean", "variance", "function_variance", "entropy", "mutual_information")
    for name in (*fields, "log_density"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)


def test_mini_batches_and_parts_of_them_change_nothing(x, monkeypatch):
    model, y = ps.Regressor(linear(), SIZE, noise="learned"), torch.randn(SIZE, 2)
    guide = fitted(model)
    whole = ps.predict_moments(model, guide, x, y=y, covariance="full")
    monkeypatch.setattr("pyro_structvi.posterior.one_pass.LARGEST", 4)
    parts = ps.predict_moments(model, guide, x, y=y, covariance="full", batch_size=3)
    for name in ("mean", "variance", "function_variance", "log_density"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))
    assert (whole.num_samples, whole.functions) == (0, None)


# ---- whole nets against draws --------------------------------------------------------------------


def mlp():
    layers = [nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


def lenet():
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU()]
    layers += [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


@pytest.mark.parametrize(
    ("make", "shape", "covariance"),
    [(mlp, (3,), "diagonal"), (mlp, (3,), "full"), (lenet, (1, 10, 10), "diagonal")],
)
def test_moments_of_whole_nets_are_near_those_of_draws(make, shape, covariance):
    """Means to a fifth of a standard deviation, and standard deviations to a third.

    An approximation: outputs of a layer count as normal, and as independent if only variances are kept.
    """
    model, x = ps.Regressor(make(), SIZE, 0.1), torch.randn(SIZE, *shape)
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    guide(x)
    found = ps.predict_moments(model, guide, x, covariance=covariance)
    drawn = ps.predict(model, guide, x, num_samples=1000)
    scale = drawn.function_variance.sqrt()
    assert ((found.mean - drawn.mean).abs() / scale).max() < 0.2
    assert (found.function_variance.sqrt() / scale - 1).abs().max() < 0.33
