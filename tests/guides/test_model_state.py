"""A guide that is loaded without the parameters and buffers of its model."""

import io
import warnings

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.guides import ModelStateWarning


def normalized():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, normalization=False), 20, 0.1)


def point_features():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, {"2.*": 1.0, "*": None}), 20, 0.1)


def saved(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("make", [normalized, point_features])
def test_predictions_without_the_models_own_state(make):
    x = torch.randn(20, 3)
    model = make()
    guide = ps.MeanFieldGuide(model)
    ps.fit(model, guide, (x, 1 + x[:, :1]), num_steps=5, progress=False)
    states = saved(guide), saved(model)
    ps.predict(model, guide, x, num_samples=2)  # warnings are errors
    new_model = make()
    new = ps.MeanFieldGuide(new_model)
    new.load_state_dict(states[0])
    with pytest.warns(ModelStateWarning, match=r"Load them too, `model.load_state_dict\(...\)`"):
        ps.predict(new_model, new, x, num_samples=2)
    again = ps.MeanFieldGuide(make())
    again.load_state_dict(new.state_dict())
    new_model.load_state_dict(states[1])
    torch.manual_seed(0)
    found = ps.predict(new_model, new, x, num_samples=2).mean
    torch.manual_seed(0)
    torch.testing.assert_close(found, ps.predict(model, guide, x, num_samples=2).mean)


def test_a_model_that_is_loaded_before_its_guide_or_trained_after_it_is_as_it_should_be():
    x, model = torch.randn(20, 3), normalized()
    guide = ps.MeanFieldGuide(model)
    ps.fit(model, guide, (x, 1 + x[:, :1]), num_steps=5, progress=False)
    for is_loaded in (True, False):
        other = normalized()
        if is_loaded:
            other.load_state_dict(saved(model))
        new = ps.MeanFieldGuide(other)
        new.load_state_dict(saved(guide))
        if not is_loaded:
            ps.fit(other, new, (x, 1 + x[:, :1]), num_steps=5, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ps.predict(other, new, x, num_samples=2)


def test_a_model_of_sites_alone_leaves_nothing_in_the_state():
    guide = ps.MeanFieldGuide(ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 20, 0.1))
    assert not [name for name in guide.state_dict() if name.endswith("model_sum")]
