"""Parameters that a guide makes after the optimizer."""

import warnings

import pyro
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.guides import NewParametersWarning
from tests.models import HandWritten, make_regressor, regression_data


def half_declared():
    """Return a model of whose sites the first call finds one more, the noise."""
    x, y = regression_data()
    return HandWritten(), (x, y.expand(-1, 2))


def step(model, guide, data, optimizer):
    ps.StructuredELBO().differentiable_loss(model, guide, *data).backward()
    optimizer.step()


def test_parameters_that_an_optimizer_cannot_have_are_named():
    model, data = half_declared()
    guide = ps.MeanFieldGuide(model)
    optimizer = torch.optim.SGD(guide.parameters(), lr=1e-3)
    with pytest.warns(NewParametersWarning, match=r"\['posteriors\.noise\.\w+'") as said:
        step(model, guide, data, optimizer)
    assert len(said) == 1
    assert "initialize" in str(said[0].message)
    step(model, guide, data, optimizer)  # it is said once
    guide.initialize(*data)


def test_inducing_points_of_the_first_batch_are_such():
    model, data = make_regressor(), regression_data()
    guide = ps.GlobalInducingGuide(model, 4)
    optimizer = torch.optim.SGD(guide.parameters(), lr=1e-3)
    with pytest.warns(NewParametersWarning, match=r"target"):
        step(model, guide, data, optimizer)


def initialized_first(model, guide, data):
    guide.initialize(*data)
    step(model, guide, data, torch.optim.SGD(guide.parameters(), lr=1e-3))


def counted_and_fitted(model, guide, data):
    """The optimizer of ``fit`` has them all."""
    assert sum(1 for _ in guide.parameters()) > 0
    ps.fit(model, guide, data, num_steps=1, progress=False)


def by_svi(model, guide, data):
    pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO()).step(*data)


def copied(model, guide, data):
    guide.__deepcopy__({})
    guide.initialize(*data)


@pytest.mark.parametrize("use", [initialized_first, counted_and_fitted, by_svi, copied])
def test_nothing_is_said_where_all_are_trained(use):
    model, data = half_declared()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(model, ps.MeanFieldGuide(model), data)
