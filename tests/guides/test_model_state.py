"""A guide without the state of its model, and parameters that a guide makes after the optimizer."""

import io
import warnings

import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.guides import ModelStateWarning, NewParametersWarning
from tests.models import HandWritten, make_regressor, regression_data


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
    data, guide = (x, 1 + x[:, :1]), ps.MeanFieldGuide(model)
    ps.fit(model, guide, data, num_steps=5, progress=False)
    for is_loaded in (True, False):
        other = normalized()
        if is_loaded:
            other.load_state_dict(saved(model))
        new = ps.MeanFieldGuide(other)
        new.load_state_dict(saved(guide))
        if not is_loaded:
            ps.fit(other, new, data, num_steps=5, progress=False)
        ps.predict(other, new, x, num_samples=2)  # warnings are errors
    guide = ps.MeanFieldGuide(ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 20, 0.1))
    assert not [name for name in guide.state_dict() if name.endswith("model_sum")]  # sites alone


def half_declared():
    """Return a model of whose sites the first call finds one more, the noise."""
    x, y = regression_data()
    return HandWritten(), (x, y.expand(-1, 2))


def step(model, guide, data, optimizer):
    ps.StructuredELBO().differentiable_loss(model, guide, *data).backward()
    optimizer.step()


def optimizer_of(guide):
    return torch.optim.SGD(guide.parameters(), lr=1e-3)


def test_parameters_that_an_optimizer_cannot_have_are_named():
    model, data = half_declared()
    guide = ps.MeanFieldGuide(model)
    optimizer = optimizer_of(guide)
    with pytest.warns(NewParametersWarning, match=r"\['posteriors\.noise\.\w+'") as said:
        step(model, guide, data, optimizer)
    assert len(said) == 1
    assert "initialize" in str(said[0].message)
    step(model, guide, data, optimizer)  # it is said once
    guide.initialize(*data)
    model, data = make_regressor(), regression_data()
    guide = ps.GlobalInducingGuide(model, 4)  # of the first batch
    optimizer = optimizer_of(guide)
    with pytest.warns(NewParametersWarning, match=r"target"):
        step(model, guide, data, optimizer)


def test_nothing_is_said_where_all_are_trained():
    (model, data), elbo = half_declared(), ps.StructuredELBO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guide = ps.MeanFieldGuide(model)
        guide.initialize(*data)
        step(model, guide, data, optimizer_of(guide))
        guide = ps.MeanFieldGuide(model)
        assert sum(1 for _ in guide.parameters()) > 0
        ps.fit(model, guide, data, num_steps=1, progress=False)  # whose optimizer has them all
        optim = pyro.optim.Adam({"lr": 0.01})
        pyro.infer.SVI(model, ps.MeanFieldGuide(model), optim, elbo).step(*data)
        guide = ps.MeanFieldGuide(model)
        guide.__deepcopy__({})
        guide.initialize(*data)
