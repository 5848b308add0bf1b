"""Optimizers of compiled steps."""

from functools import partial

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch.optim.optimizer import register_optimizer_step_post_hook

import pyro_structvi as ps
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep, Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from tests.infer.compiled_steps import STEPS, adam, assert_same, make_k_tied, steps_of, train
from tests.models import make_linear_regressor, regression_data


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


@pytest.mark.parametrize("step_of", [EagerStep, partial(CompiledStep, backend=None)])
def test_a_group_that_is_added_begins_without_gradients_of_earlier_steps(step_of):
    def parameters_after(steps):
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        guide.initialize(*regression_data())
        first, *others = guide.parameters()
        optimizer = torch.optim.SGD([first], lr=1e-300)
        step = step_of(Loss(model, guide, ps.StructuredELBO()), OneOptimizer(optimizer))
        pyro.set_rng_seed(1)
        data = regression_data()
        for _ in range(steps):
            step(*data)
        optimizer.add_param_group({"params": others, "lr": 0.01})
        pyro.set_rng_seed(2)
        step(*data)
        return others

    torch.testing.assert_close(parameters_after(2), parameters_after(0), rtol=1e-10, atol=0)


def clear(state):
    state.clear()


def begin_anew(state):
    for own in state.values():
        own["exp_avg"] = torch.zeros_like(own["exp_avg"])


@pytest.mark.parametrize("change", [clear, begin_anew])
def test_a_state_of_the_optimizer_that_is_replaced_is_seen(change):
    def losses_of(step_of):
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        data = regression_data()
        guide.initialize(*data)
        optimizer = torch.optim.Adam(guide.parameters(), lr=0.1, fused=True)
        step = step_of(Loss(model, guide, ps.StructuredELBO()), OneOptimizer(optimizer))
        losses = []
        for number in range(9):
            if number == 6:
                change(optimizer.state)
            losses.append(step(*data).loss)
        return losses

    assert losses_of(partial(CompiledStep, backend=None)) == losses_of(EagerStep)


def test_a_guide_that_is_frozen_between_steps_is_not_trained():
    model, guide = make_k_tied()
    data, optimizer = regression_data(), torch.optim.Adam(guide.parameters(), lr=0.01)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    for number in range(STEPS):
        guide.requires_grad_(number < 3)
        if number == 3:
            before = {name: value.clone() for name, value in guide.state_dict().items()}
        svi.step(*data)
    torch.testing.assert_close(dict(guide.state_dict()), before, rtol=0, atol=0)


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
    with pytest.raises(
        TypeError, match=r"gradients of one pass, but LBFGS .* `torch\.optim\.Adam`"
    ):
        ps.fit(model, guide, regression_data(), num_steps=1, optimizer=torch.optim.LBFGS)
    svi = ps.CompiledSVI(model, guide, pyro.optim.AdagradRMSProp({}), ps.StructuredELBO())
    for _ in range(2):
        with pytest.raises(
            TypeError, match=r"a learning rate `lr`, but AdagradRMSProp has .*'eta'"
        ):
            svi.step(*regression_data())
    used = adam()
    SVI(model, guide, used, ps.StructuredELBO()).step(*regression_data())
    with pytest.raises(ValueError, match="has the state of single parameters"):
        ps.CompiledSVI(model, guide, used, ps.StructuredELBO())


@pytest.mark.parametrize("rate", [-1.0, float("nan")])
def test_a_wrong_rate_is_refused_before_the_first_step(rate):
    model, guide = make_k_tied()
    before = [value.clone() for value in guide.parameters()]
    svi = ps.CompiledSVI(
        model, guide, pyro.optim.SGD({"lr": rate}), ps.StructuredELBO(), backend=None
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=f"`lr` must be a finite number of .* got {rate}"):
            svi.step(*regression_data())
    torch.testing.assert_close([*guide.parameters()], before, rtol=0, atol=0)


def fused_adam(guide):
    return torch.optim.Adam(guide.parameters(), lr=0.01, fused=True)


def structured_adam(guide):
    return ps.StructuredAdam(guide.parameters(), guide, clip=0.5, warm_up=10)


@pytest.mark.parametrize("backend", [None, slow("inductor")])
@pytest.mark.parametrize(
    ("make_guide", "make_optimizer"),
    [
        *((ps.KTiedGuide, fused_adam), (ps.RowwiseGuide, structured_adam)),
        pytest.param(ps.KTiedGuide, structured_adam, marks=pytest.mark.slow),
        pytest.param(ps.RowwiseGuide, fused_adam, marks=pytest.mark.slow),
    ],
)
def test_a_traced_update_reads_rates_and_notices_options(make_optimizer, make_guide, backend):
    """As a loop of one's own does, with rates and options that change between its steps."""
    data = regression_data()

    def steps(compiled):
        pyro.set_rng_seed(0)
        model = make_linear_regressor()
        guide = make_guide(model)
        guide.initialize(*data)
        optimizer, elbo = make_optimizer(guide), ps.StructuredELBO()
        svi = ps.CompiledSVI(model, guide, optimizer, elbo, backend=backend)
        for number in range(14):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 if number < 6 else torch.tensor(0.01, dtype=torch.float64)
                group["betas"] = (0.9, 0.99) if number < 9 else (0.5, 0.9)
            if compiled:
                svi.step(*data)
            else:
                optimizer.zero_grad()
                elbo.differentiable_loss(model, guide, *data).backward()
                optimizer.step()
        assert not compiled or all(each.updates for each in steps_of(svi))
        return dict(guide.state_dict()), optimizer.state_dict()["state"]

    torch.testing.assert_close(steps(compiled=True), steps(compiled=False), rtol=1e-9, atol=1e-12)


def test_state_that_an_optimizer_makes_late_is_refused_and_nothing_changes():
    """A replay would make it anew each time."""

    class LateAdam(torch.optim.Adam):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            if self.calls > 2:
                return super().step(closure)
            return None

        step.__module__ = torch.optim.Adam.__module__  # as if it were torch's own

    model, guide = make_k_tied()
    data = regression_data()
    guide.initialize(*data)
    optimizer = LateAdam(guide.parameters(), lr=0.01, fused=True)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    for _ in range(2):
        svi.step(*data)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    draws = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="the optimizer makes its state in this step"):
        svi.step(*data)
    torch.testing.assert_close(dict(guide.state_dict()), before, rtol=0, atol=0)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), draws)


class Lookahead(torch.optim.Adam):
    """Goes halfway back every third step."""

    calls = 0

    def step(self, closure=None):
        before = [value.detach().clone() for value in self.param_groups[0]["params"]]
        loss, self.calls = super().step(closure), self.calls + 1
        for value, own in zip(self.param_groups[0]["params"], before, strict=True):
            value.data.lerp_(own, 0.5 * (self.calls % 3 == 0))
        return loss


def test_a_step_of_a_class_of_others_runs_in_every_step():
    found = []
    for compiled in (False, "traced"):
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        optimizer = partial(Lookahead, fused=True)
        options = {"num_steps": 110, "lr": 0.01, "compiled": compiled, "progress": False}
        ps.fit(model, guide, regression_data(), optimizer=optimizer, **options)
        found.append([*guide.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_an_optimizer_run_in_every_step(hook):
    """Those that are there from the start, and one that comes when steps are replayed."""
    model, guide = make_k_tied()
    data, calls = regression_data(), []
    guide.initialize(*data)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.01, fused=True)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    for number in range(12):
        if number == 4:
            assert [step.updates for step in steps_of(svi)] == [True]
            getattr(optimizer, hook)(lambda *args: calls.append(args))
        svi.step(*data)
    assert len(calls) == 8


def test_hooks_of_all_optimizers_run_in_every_step():
    model, guide = make_k_tied()
    data, calls = regression_data(), []
    svi = ps.CompiledSVI(
        model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO(), backend=None
    )
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(args))
    try:
        for _ in range(6):
            svi.step(*data)
    finally:
        handle.remove()
    assert len(calls) == 6
