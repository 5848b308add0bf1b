"""Optimizers of compiled steps."""

import pyro
import pytest
import torch
from pyro.infer import SVI

import pyro_structvi as ps
from tests.infer.compiled_steps import STEPS, adam, assert_same, make_k_tied, train
from tests.models import regression_data


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "optim",
    [
        slow(lambda: pyro.optim.SGD({"lr": 1e-4, "momentum": 0.9})),
        slow(lambda: pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 0.1})),
        slow(lambda: pyro.optim.AdamW({"lr": 0.01, "weight_decay": 0.1}, {"clip_norm": 0.5})),
        lambda: pyro.optim.Adam(lambda name: {"lr": 0.1 if name.endswith("loc") else 0.01}),
        slow(lambda: pyro.optim.RMSprop({"lr": 0.01})),
    ],
    ids=["SGD", "ClippedAdam", "clipped AdamW", "rates by name", "RMSprop"],
)
def test_pyro_optimizers_become_one(optim):
    assert_same(make_k_tied, regression_data(), optim=optim)


def test_one_fused_optimizer_has_all_parameters():
    _, _, svi = train(make_k_tied, regression_data(), compiled=True)
    (group,) = svi.optimizer.param_groups
    assert group["fused"]
    assert len(group["params"]) == len(list(svi.guide.parameters()))


def test_a_torch_optimizer_trains_what_it_was_made_of():
    pyro.set_rng_seed(0)
    model, guide = make_k_tied()
    data = regression_data()
    trained = [value for name, value in guide.named_parameters() if name.endswith("loc")]
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    optimizer = torch.optim.Adam(trained, lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    for _ in range(STEPS):
        svi.step(*data)
        schedule.step()
    assert svi.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**STEPS)
    for name, value in guide.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.endswith("loc"))
    assert all(parameter.grad is None for parameter in guide.parameters())


def test_optimizers_that_cannot_be_one_are_refused():
    model, guide = make_k_tied()
    scheduled = pyro.optim.ExponentialLR({
        "optimizer": torch.optim.Adam,
        "optim_args": {"lr": 0.01},
        "gamma": 0.9,
    })
    for wrong in (scheduled, torch.optim.Adam, None):
        with pytest.raises(TypeError, match="`optim` must be a"):
            ps.CompiledSVI(model, guide, wrong, ps.StructuredELBO())
    used = adam()
    SVI(model, guide, used, ps.StructuredELBO()).step(*regression_data())
    with pytest.raises(ValueError, match="has the state of single parameters"):
        ps.CompiledSVI(model, guide, used, ps.StructuredELBO())
