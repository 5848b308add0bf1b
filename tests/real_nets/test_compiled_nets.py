"""Compiled steps of real nets are the steps of SVI, in double and in single precision."""

import pyro
import pytest
import torch
from pyro.infer import SVI

import pyro_structvi as ps
from tests.guide_cases import GUIDES
from tests.infer.compiled_steps import assert_same
from tests.real_nets.nets import CASES


def train(case, guide_name, make, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, data = case.make()
    optim = pyro.optim.Adam({"lr": 0.01})
    svi = make(model, GUIDES[guide_name](model), optim, ps.StructuredELBO(), **options)
    return [svi.step(*data) for _ in range(3)]


FAST = ("dictionary of inputs",)


def pairs():
    for case in CASES:
        marks = () if case.name in FAST else pytest.mark.slow
        if "packed" not in case.name:
            yield pytest.param(case, "k-tied", id=case.name, marks=marks)
        if case.name in ("LeNet", "transformer encoder"):
            yield pytest.param(case, "inducing weights", id=f"{case}, inducing", marks=marks)


@pytest.mark.parametrize(("case", "guide_name"), [*pairs()])
def test_compiled_steps_are_those_of_svi(case, guide_name):
    losses = train(case, guide_name, SVI)
    own = train(case, guide_name, ps.CompiledSVI, backend=None)
    torch.testing.assert_close(own, losses, rtol=1e-8, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES if "packed" in case.name], ids=str)
def test_lengths_that_determine_sizes_are_named(case):
    with pytest.raises(RuntimeError, match=r"the size of a result depends .*nets\.py:\d+"):
        train(case, "k-tied", ps.CompiledSVI, backend=None)


@pytest.fixture
def single_precision():
    """Compute in float32, for which torch has other operations on a CPU."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


IN_SINGLE = ("LeNet", "transformer encoder")
SLOW_IN_SINGLE = ("vision transformer", "LSTM", "two inputs, two outputs", "weight normalization")


def still():
    """Return an optimizer whose steps do not move the net."""
    return pyro.optim.SGD({"lr": 1e-7})


@pytest.mark.usefixtures("single_precision")
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in IN_SINGLE else pytest.mark.slow)
        for case in CASES
        if case.name in IN_SINGLE + SLOW_IN_SINGLE
    ],
)
def test_recorded_steps_are_the_eager_ones(case):
    _, data = case.make()
    data = [each.float() if each.is_floating_point() else each for each in data]

    def make():
        model, _ = case.make()
        return model.float(), ps.KTiedGuide(model)

    assert_same(make, data, rtol=0, steps=3, optim=still)
