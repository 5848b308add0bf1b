"""Compiled steps of real nets are the steps of SVI, in double and in single precision."""

import pyro
import pytest
import torch

import pyro_structvi as ps
from tests.guide_cases import GUIDES
from tests.infer.compiled_steps import adam, assert_same
from tests.real_nets.nets import CASES

IN_SINGLE = ("LeNet", "transformer encoder", "vision transformer", "LSTM", "weight normalization")


def steps_of():
    """Yield nets with guides and dtypes; a CPU has other operations in float32."""
    for case in CASES:
        names = [] if "packed" in case.name else ["k-tied"]
        names += ["inducing weights"] * (case.name in ("LeNet", "transformer encoder"))
        for guide_name in names:
            for dtype in (torch.float64, torch.float32)[: 1 + (case.name in IN_SINGLE)]:
                is_fast = case.name == "dictionary of inputs" or (
                    case.name in IN_SINGLE[:2] and (guide_name, dtype) == ("k-tied", torch.float32)
                )
                marks = () if is_fast else pytest.mark.slow
                own = f"{case}, {guide_name}, {dtype}"
                yield pytest.param(case, guide_name, dtype, id=own, marks=marks)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(("case", "guide_name", "dtype"), [*steps_of()])
def test_compiled_steps_are_those_of_svi(case, guide_name, dtype):
    torch.set_default_dtype(dtype)
    data = [each.to(dtype) if each.is_floating_point() else each for each in case.make()[1]]

    def make():
        model, _ = case.make()
        return model.to(dtype), GUIDES[guide_name](model)

    is_double = dtype == torch.float64
    optim, rtol = (adam, 1e-8) if is_double else (still, 0)
    assert_same(make, data, rtol=rtol, steps=5, optim=optim)


def test_a_read_of_lengths_is_named():
    (case,) = (case for case in CASES if "packed" in case.name)
    model, data = case.make()
    svi = ps.CompiledSVI(model, ps.KTiedGuide(model), adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(RuntimeError, match=r"reads a tensor's value .*nets\.py:\d+"):
        svi.step(*data), svi.step(*data), svi.step(*data)


def still():
    return pyro.optim.SGD({"lr": 1e-7})
