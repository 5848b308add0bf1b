"""What every step looks at before it updates, eager or compiled: numbers, rates, parameters."""

import math
import random
import warnings

import numpy as np
import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.models import make_linear_regressor, regression_data


def with_statistics():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, normalization=False), 12, 0.3)


def adam(lr=0.01):
    return pyro.optim.Adam({"lr": lr})


def compiled(model, guide, optim=None, loss=None, **options):
    loss = ps.StructuredELBO() if loss is None else loss
    return ps.CompiledSVI(model, guide, optim or adam(), loss, backend=None, **options)


def states(*parts):
    return {
        f"{number}.{name}": value.clone()
        for number, part in enumerate(parts)
        for name, value in part.state_dict().items()
    }


def not_a_number(data):
    x, y = (value.clone() for value in data)
    x[3] = math.nan
    return x, y


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_nan_row_stops_a_step_and_changes_nothing(steps_before):
    model = with_statistics()
    guide, data = ps.KTiedGuide(model), regression_data()
    svi = compiled(model, guide)
    guide.initialize(*data)
    for _ in range(steps_before):
        svi.step(*data)
    before = states(model, guide)
    with pytest.raises(FloatingPointError, match=r"the data \['argument 0'\] is not finite"):
        svi.step(*not_a_number(data))
    torch.testing.assert_close(states(model, guide), before, rtol=0, atol=0)
    assert math.isfinite(svi.step(*data))
    batches = [data] * steps_before + [not_a_number(data)]
    with pytest.raises(FloatingPointError, match=f"At step {steps_before}, the data"):
        ps.fit(model, guide, batches, num_epochs=1, progress=False)
    assert states(model)["0.net.1.num_batches_tracked"] == 2 * steps_before + 1
    assert all(torch.isfinite(value).all() for value in states(model, guide).values())


@pytest.mark.parametrize("is_pyros", [True, False])
def test_an_error_of_the_model_is_raised_and_changes_nothing(is_pyros):
    model = make_linear_regressor()
    guide, (x, y) = ps.KTiedGuide(model), regression_data()
    optim = adam() if is_pyros else torch.optim.Adam(guide.parameters())
    svi = compiled(model, guide, optim)
    before = states(guide)
    with pytest.raises(ValueError, match="`y` must have shape that of the net's output"):
        svi.step(x, y[:, 0])
    torch.testing.assert_close(states(guide), before, rtol=0, atol=0)
    assert math.isfinite(svi.step(x, y))


# ---- rates and weights -------------------------------------------------------------------------------


def test_learning_rates_must_be_finite_and_not_negative():
    guide, data = ps.KTiedGuide(make_linear_regressor()), regression_data()
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.1)
    svi = compiled(guide.model, guide, optimizer)
    for _ in range(3):
        svi.step(*data)
    before = states(guide)
    for rate in (-0.1, math.nan):
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(ValueError, match="`lr` must be a finite number of at least 0"):
            svi.step(*data)
    torch.testing.assert_close(states(guide), before, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "bad"), [("lr", -1.0), ("kl_weight", math.nan)])
def test_schedules_must_return_finite_numbers_of_at_least_zero(name, bad):
    guide, data = ps.MeanFieldGuide(make_linear_regressor()), regression_data()
    schedule = {name: lambda step: bad if step == 2 else 1.0}
    with pytest.raises(ValueError, match=f"`{name}` must return a finite number of at least 0"):
        ps.fit(guide.model, guide, data, num_steps=4, progress=False, **schedule)
    assert all(torch.isfinite(parameter).all() for parameter in guide.parameters())


# ---- parameters --------------------------------------------------------------------------------------


def test_an_optimizer_of_foreign_parameters_is_refused():
    guide, foreign = (ps.KTiedGuide(make_linear_regressor()) for _ in range(2))
    parameters = [*foreign.parameters(), *guide.parameters()]
    svi = compiled(guide.model, guide, torch.optim.Adam(parameters))
    before = states(guide)
    with pytest.raises(
        ValueError, match=r"`optim` must train parameters of model and guide, but 3"
    ):
        svi.step(*regression_data())
    torch.testing.assert_close(states(guide), before, rtol=0, atol=0)


def test_parameters_that_a_function_knows_by_name_are_its_own():
    """They are not in a module, in a closure's cell or in the param store."""
    holder = {"weight": torch.zeros(3, 1, requires_grad=True)}

    def model(x, y):
        noise = pyro.sample("noise", pyro.distributions.LogNormal(0.0, torch.tensor(1.0)))
        with pyro.plate("data", len(x)):
            mean = x @ holder["weight"]
            pyro.sample("obs", pyro.distributions.Normal(mean, noise).to_event(1), obs=y)

    guide, data = ps.MeanFieldGuide(model), regression_data()
    guide.initialize(*data)
    optimizer = torch.optim.Adam([holder["weight"], *guide.parameters()], lr=0.1)
    compiled(model, guide, optimizer).step(*data)
    assert holder["weight"].abs().min() > 0


# ---- what a trace does not see -----------------------------------------------------------------------


class DropsByPython(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(3, 3), nn.Linear(3, 1), draw

    def forward(self, x):
        return self.last(self.first(x) if self.draw() < 0.5 else x)


DRAWS = (  # NumPy draws every second normal with the one before
    random.random,
    *(lambda: np.random.random(), lambda: np.random.normal()),  # noqa: NPY002
)


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_python_are_not_compiled(draw):
    model = ps.Regressor(ps.bayesianize(DropsByPython(draw)), 12, 0.3)
    guide, data = ps.MeanFieldGuide(model), regression_data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pass that counts uses may skip the layer
        guide.initialize(*data)
    svi = compiled(model, guide)
    for _ in range(2):
        svi.step(*data)
    before = states(guide)
    with pytest.raises(RuntimeError, match=r"a step changes .*`state` of .*draw random numbers"):
        svi.step(*data)
    torch.testing.assert_close(states(guide), before, rtol=0, atol=0)
    svi = compiled(model, guide, fallback=True)
    svi.step(*data)
    with pytest.warns(UserWarning, match="The step runs uncompiled"):
        svi.step(*data)
