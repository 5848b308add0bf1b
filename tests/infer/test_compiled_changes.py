"""What changes between compiled steps is seen."""

from collections import OrderedDict, UserList
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import CompileFallbackWarning
from pyro_structvi.infer.steps.compiled import MOST_KINDS
from pyro_structvi.infer.steps.replayed import Call
from pyro_structvi.infer.steps.state import Modules
from tests.infer.compiled_steps import (
    adam,
    assert_same,
    function_pair,
    make_k_tied,
    steps_of,
    train,
)
from tests.models import make_linear_regressor, regression_data


class Shifted(nn.Module):
    """A net with a buffer and a shift that is an attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 1), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(1))
        self.activation, self.factors = torch.tanh, {"output": [3.0]}
        self.offsets, self.config = OrderedDict(output=0.0), SimpleNamespace(factor=1.0)

    def forward(self, x):
        output = self.config.factor * self.activation(self.dropout(self.linear(x)))
        return self.factors["output"][0] * output + self.shift + self.offsets["output"]


def prune(svi):
    ps.pruning.prune_mean_field(svi.guide, 0.5)


def replace_buffer(svi):
    svi.model.net.shift = torch.ones(1)


def evaluate(svi):
    svi.model.eval()


def tell_num_data(svi):
    svi.model.num_data = 1000


def replace_function(svi):
    svi.model.net.activation = torch.sin


def change_list(svi):
    svi.model.net.factors["output"][0] = 2.0


def change_ordered(svi):
    svi.model.net.offsets["output"] = 1.0


def replace_object(svi):
    svi.model.net.config = SimpleNamespace(factor=2.0)


def change_object(svi):
    svi.model.net.config.factor = 2.0


def shift_outputs(svi):
    svi.model.net.linear.register_forward_hook(lambda module, args, output: output + 1)


def shift_gradients(svi):
    for parameter in svi.guide.parameters():
        parameter.register_hook(lambda gradient: gradient + 1)


def use_twice(svi):
    svi.model.net.linear.register_forward_pre_hook(
        lambda module, args: (module.weight.sum(), None)[1]
    )
    svi.guide.initialize(*regression_data())


def make_shifted():
    model = ps.Regressor(ps.bayesianize(Shifted(), prior=1.0), 12, 0.3)
    return model, ps.MeanFieldGuide(model)


@cache
def last_loss_without_a_change():
    pyro.set_rng_seed(0)
    return train(make_shifted, regression_data(), compiled=True, steps=9)[0][-1]


@pytest.mark.parametrize(
    "change",
    [
        *(prune, use_twice, shift_outputs, shift_gradients, replace_function, change_list),
        change_object,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (change_ordered, replace_object, replace_buffer, evaluate, tell_num_data)
        ),
    ],
)
def test_changes_of_model_and_guide_are_seen(change):
    def at_four(svi, number):
        if number == 4:
            change(svi)

    data = regression_data()
    losses, *_ = train(make_shifted, data, compiled=False, steps=9, change=at_four)
    own, *_ = train(make_shifted, data, compiled=True, steps=9, change=at_four)
    torch.testing.assert_close(own, losses, rtol=1e-10, atol=0)
    assert own[-1] != last_loss_without_a_change()


@dataclass
class Options:
    """A value that compares by its fields, and has no hash."""

    scale: float = 1.0


@dataclass(slots=True)
class Slots:
    """A value without a dictionary of attributes."""

    scale: float = 1.0


VALUES = {  # of attributes, before and after
    "a bool": (True, 1),
    "a complex number": (1j, 2j),
    "bytes": (b"1", b"2"),
    "a scalar of NumPy": (np.float64(1), np.float64(2)),
    "an array": (np.ones(1), np.zeros(1)),
    "a large array": (np.zeros(200), np.ones(200)),
    "a set": ({1.0}, {2.0}),
    "a frozen set": (frozenset({1.0}), frozenset({2.0})),
    "a list": ([1], [True]),
    "a large list": ([1.0] * 200, [2.0] * 200),
    "keys": ({"a": 1}, {"b": 1}),
    "a list of a user": (UserList([1.0]), UserList([2.0])),
    "a dtype": (torch.float32, torch.float64),
    "a range": (range(1), range(2)),
    "a slice": (slice(1), slice(2)),
    "an object": (Options(1.0), Options(2.0)),
    "an object in a list": ([Options(1.0)], [Options(2.0)]),
    "slots": (Slots(1.0), Slots(2.0)),
    "an equal object": (object(), object()),
    "a class": (Options, Slots),
    "a partial function": (partial(torch.mul, other=1.0), partial(torch.mul, other=2.0)),
    "a distribution": (dist.Normal(0.0, 1.0), dist.Normal(0.0, 2.0)),
    "a module in a list": ([nn.LeakyReLU(1.0)], [nn.LeakyReLU(2.0)]),
}


@pytest.mark.parametrize("kind", VALUES)
def test_attributes_of_all_types_that_are_replaced_are_seen(kind):
    net = nn.Linear(1, 1)
    net.option, other = VALUES[kind]
    modules = Modules((net, lambda: None))
    before = modules.state()
    assert modules.state() == before
    assert hash((*modules.state().values(),)) == hash((*before.values(),))
    net.option = other
    assert modules.state() != before


CHANGES = {
    "an attribute": (Options(), lambda value: setattr(value, "scale", 2.0)),
    "a slot": (Slots(), lambda value: setattr(value, "scale", 2.0)),
    "an item of an attribute": (Options({}), lambda value: value.scale.update(a=1)),
    "an attribute of an item": ({"a": Options()}, lambda value: setattr(value["a"], "scale", 2.0)),
    "an attribute of an attribute": (
        Options(Options()),
        lambda value: setattr(value.scale, "scale", 2.0),
    ),
    "an element": (np.ones(1), lambda value: value.fill(2.0)),
    "a member": ({1.0}, lambda value: value.add(2.0)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_inside_of_attributes_are_seen(kind):
    net, (value, change) = nn.Linear(1, 1), CHANGES[kind]
    net.option = deepcopy(value)
    modules = Modules((net, lambda: None))
    before = modules.state()
    change(net.option)
    assert modules.state() != before


def test_attributes_that_hold_themselves_have_a_state():
    net = nn.Linear(1, 1)
    net.option, net.options = Options(), []
    net.option.scale = net.option
    net.options.append(net.options)
    modules = Modules((net, lambda: None))
    assert modules.state() == modules.state()


@pytest.mark.parametrize("joined", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_prior_that_is_changed_in_place_is_seen(joined):
    """A step with inducing weights leaves out a divergence that is zero for the prior at the start."""

    def make():
        model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1), prior=1.0), 12, 0.3)
        return model, ps.InducingWeightGuide(model, (2, 2), join_bias=joined)

    def widen_and_back(svi, number):
        if number in (4, 8):
            svi.model.net.weight_prior_scale.data.mul_(2.0 if number == 4 else 0.5)

    losses = assert_same(make, regression_data(), steps=11, change=widen_and_back)
    unchanged, *_ = train(make, regression_data(), compiled=True, steps=9)
    assert losses[4] != pytest.approx(unchanged[4], rel=1e-3)


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_what_a_prior_computes_from_a_buffer_is_seen():
    prior = dist.AsymmetricLaplace(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0))

    def make():
        net = ps.bayesianize(nn.Linear(3, 1), {"bias": prior, "*": 1.0})
        model = ps.Regressor(net, 12, 0.3)
        return model, ps.MeanFieldGuide(model)

    def widen(svi, number):
        if number == 4:
            svi.model.net.bias_prior_scale.mul_(2.0)

    assert_same(make, regression_data(), steps=6, change=widen)


class Masked(nn.Linear):
    """Has tensors that are no buffers."""

    def __init__(self):
        super().__init__(3, 1)
        self.mask, self.masks = torch.ones(3), [torch.ones(3)]

    def forward(self, x):
        return super().forward(x * self.mask * self.masks[0])


@pytest.mark.parametrize("place", ["attribute", pytest.param("list", marks=pytest.mark.slow)])
def test_tensors_that_are_replaced_are_seen(place):
    def make():
        model = ps.Regressor(ps.bayesianize(Masked(), prior=1.0), 12, 0.3)
        return model, ps.KTiedGuide(model)

    def replace(svi, number):
        if number == 5 and place == "attribute":
            svi.model.net.mask = torch.tensor([1.0, 0.0, 2.0])
        elif number == 5:
            svi.model.net.masks[0] = torch.tensor([1.0, 0.0, 2.0])

    losses = assert_same(make, regression_data(), steps=10, change=replace)
    unchanged, *_ = train(make, regression_data(), compiled=True, steps=6)
    assert losses[5] != pytest.approx(unchanged[5], rel=1e-3)


@pytest.mark.parametrize("kind", ["tensor", "dictionary"])
def test_data_that_a_function_finds_outside_are_seen(kind):
    """As in a notebook, where a cell defines the next data."""
    y, given = torch.linspace(0, 3, 10), {}

    def make():
        nonlocal y
        y, given["y"] = torch.linspace(0, 3, 10), torch.linspace(0, 3, 10)

        def model():
            mean = pyro.sample("mean", dist.Normal(torch.zeros(()), 2.0))
            with pyro.plate("data", 10):
                observed = y if kind == "tensor" else given["y"]
                pyro.sample("obs", dist.Normal(mean, 1.0), obs=observed)

        return model, ps.MAPGuide(model)

    def change(svi, number):
        nonlocal y
        if number == 5:
            y, given["y"] = y + 3, y + 3

    assert_same(make, (), steps=10, change=change)


def test_handlers_around_steps_are_seen():
    """A scale that falls after the fifth of seven steps, as in a user's own annealing."""
    found = []
    for compiled in (False, True):
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        loss = ps.StructuredELBO()
        svi = (
            ps.CompiledSVI(model, guide, adam(), loss, backend=None)
            if compiled
            else SVI(model, guide, adam(), loss)
        )
        losses = []
        for scale in [1.0] * 5 + [0.1] * 2:
            with pyro.poutine.scale(scale=scale):
                losses.append(svi.step(*regression_data()))
        found.append(losses)
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)
    assert len(steps_of(svi)) == 2


@pytest.mark.parametrize(("option", "value"), [("num_particles", 3), ("estimator", "moments")])
def test_other_options_of_the_objective_are_compiled_apart(option, value):
    _, _, svi = train(make_k_tied, regression_data(), compiled=True)
    for expected in (1, 2):
        svi.step(*regression_data())
        assert len(steps_of(svi)) == expected
        setattr(svi.loss, option, value)


@pytest.mark.parametrize("make_guide", [ps.KTiedGuide, ps.InducingWeightGuide])
def test_an_evaluation_between_steps_is_no_change(make_guide):
    """Inducing weights keep a distribution as long as the parameters stay equal."""
    model = make_linear_regressor()
    guide, data = make_guide(model), regression_data()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    for _ in range(5):
        svi.step(*data)
    (step,) = steps_of(svi)
    svi.evaluate_loss(*data)
    assert svi._step.kind_of(Call(data, {})) is step


@pytest.mark.slow
def test_modes_are_seen_behind_methods_and_closures():
    def make(model_of):
        nonlocal model
        model = ps.Regressor(ps.bayesianize(Shifted(), prior=1.0), 12, 0.3)
        return model_of(model), ps.MeanFieldGuide(model).forward

    def switch(svi, number):
        model.train(number < 5)

    model = None
    for model_of in (lambda model: model.forward, lambda model: lambda *args: model(*args)):
        assert_same(partial(make, model_of), regression_data(), steps=9, change=switch)


def test_entries_of_the_param_store_that_are_replaced_are_seen():
    def at_four(svi, number):
        if number == 4:
            pyro.clear_param_store()

    assert_same(function_pair, (), steps=9, change=at_four)


def test_one_tensor_in_two_roles_is_two_inputs():
    def model(x, z, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("obs", dist.Normal(x @ weight + z.sum(-1), 1.0).to_event(1), obs=y)

    def data(number):
        return x, x if number < 5 else 2 * x, y[:, 0]

    x, y = regression_data()
    assert_same(lambda: (model, ps.MeanFieldGuide(model)), data, steps=8)


def test_equal_numbers_of_other_types_are_other_arguments():
    assert Call((1,), {}).key != Call((True,), {}).key
    assert Call((1,), {}).key == Call((1,), {}).key
    x = torch.zeros(2, 3, 4)
    assert Call((x,), {}).key != Call((x.mT.contiguous().mT,), {}).key


def test_many_kinds_of_steps_are_said():
    model, guide = make_k_tied()

    def scaled(x, y, factor):
        return model(x * factor, y)

    svi = ps.CompiledSVI(
        scaled, lambda x, y, factor: guide(x, y), adam(), ps.StructuredELBO(), backend=None
    )
    x, y = regression_data()
    guide.initialize(x, y)
    for number in range(MOST_KINDS):
        svi.step(x, y, 1.0 + number)
    with pytest.warns(CompileFallbackWarning, match=f"more than {MOST_KINDS} kinds of steps"):
        svi.step(x, y, 0.5)
    assert len(steps_of(svi)) == MOST_KINDS


SHIFTED = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def of_a_global(x, y):
    pyro.module("net", SHIFTED)
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(SHIFTED(x), noise).to_event(1), obs=y)


def test_modules_that_a_function_names_as_globals_are_its_own():
    def make():
        SHIFTED.to(torch.get_default_dtype())
        for part in SHIFTED[::2]:
            part.reset_parameters()
        return of_a_global, ps.MeanFieldGuide(of_a_global)

    def switch(svi, number):
        SHIFTED.train(number < 6)

    found, data = [], regression_data()
    for compiled in (False, True):
        losses, *_ = train(make, data, compiled, steps=9, change=switch)
        found.append((losses, SHIFTED[0].running_mean.clone()))
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)
