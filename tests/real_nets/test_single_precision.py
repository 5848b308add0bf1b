"""Recorded steps of nets in single precision, for which torch has operations of its own on a CPU."""

import pyro
import pytest
import torch

import pyro_structvi as ps
from tests.infer.compiled_steps import assert_same
from tests.real_nets.nets import CASES

FAST = ("LeNet", "transformer encoder")
SLOW = ("vision transformer", "LSTM", "two inputs, two outputs", "weight normalization")


def still():
    """Return an optimizer with steps so small that no net leaves its place."""
    return pyro.optim.SGD({"lr": 1e-7})


@pytest.fixture
def single_precision():
    """Compute in float32, and in float64 as other tests do afterwards."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in CASES
        if case.name in FAST + SLOW
    ],
)
def test_recorded_steps_are_the_eager_ones(case):
    _, data = case.make()
    data = [each.float() if each.is_floating_point() else each for each in data]

    def make():
        model, _ = case.make()
        return model.float(), ps.KTiedGuide(model)

    assert_same(make, data, rtol=0, steps=3, optim=still)
