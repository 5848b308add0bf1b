"""Steps that end by an error or an interrupt: nothing is half changed, and training goes on."""

import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer.steps.compiled import TIMED
from pyro_structvi.infer.steps.replayed import ReplayedStep
from tests.infer.test_checked_steps import states, with_statistics
from tests.models import regression_data


def compiled(model=None, data=None, fused=True):
    """Return guide, optimizer and traced steps of a model with running statistics, and its data."""
    pyro.set_rng_seed(0)
    model, data = model or with_statistics(), data or regression_data()
    guide = ps.KTiedGuide(model)
    guide.initialize(*data)
    optimizer = torch.optim.Adam([*guide.parameters(), *model.parameters()], lr=0.01, fused=fused)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    return guide, optimizer, svi, data


def fail(*args):
    raise ZeroDivisionError


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["_differentiate", "_update"])
def test_an_interrupted_record_is_made_again(name, monkeypatch):
    guide, _, svi, data = compiled()
    losses = [svi.step(*data) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(ReplayedStep, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            svi.step(*data)
    losses += [svi.step(*data) for _ in range(6)]
    other, _, whole, data = compiled()
    assert losses == [whole.step(*data) for _ in range(8)]
    torch.testing.assert_close(states(guide), states(other), rtol=0, atol=0)


class Shrinking(nn.Module):
    """Shrinks a parameter in each pass."""

    def __init__(self):
        super().__init__()
        self.last, self.shift = nn.Linear(3, 1), nn.Parameter(torch.ones(1))

    def forward(self, x):
        self.shift.data.mul_(0.9)
        return self.last(x) + self.shift.detach()


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_parameter_that_a_pass_changes_is_changed_once(is_fused):
    model = ps.Regressor(ps.bayesianize(Shrinking(), prior={"last*": 1.0, "shift": None}), 12, 0.3)
    _, _, svi, data = compiled(model, fused=is_fused)
    before = model.net.shift.clone()
    for number in range(1, 7):
        svi.step(*data)
        torch.testing.assert_close(model.net.shift, before * 0.9**number)


class Looking(nn.Module):
    """Looks an output up behind the running statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.table = nn.Embedding(4, 1)

    def forward(self, x):
        return self.last(self.norm(x[:, :3])) + self.table(x[:, 3].long())


@pytest.mark.parametrize(
    ("error", "steps", "is_fused"),
    [
        *((*case, True) for case in (("index", 1), ("index", 6), ("hook", 3), ("hook", 6))),
        *(("index", 6, False), ("hook", 6, False)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("index", 1, False), ("hook", 1, True), ("hook", 1, False))
        ),
        pytest.param("hook", 3, False, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_fails_leaves_buffers_as_they_were(error, steps, is_fused):
    model = ps.Regressor(ps.bayesianize(Looking(), normalization=False), 12, 0.3)
    pyro.set_rng_seed(0)
    x, y = regression_data()
    data = torch.cat([x, torch.zeros(12, 1)], -1), y
    guide, optimizer, svi, _ = compiled(model, data, is_fused)
    for _ in range(steps):
        svi.step(*data)
    before = states(model, guide)
    if error == "index":
        with pytest.raises(IndexError, match="index out of range in self") as raised:
            svi.step(data[0] + 9, y)
        assert any(
            (each.name, str(each.path)) == ("forward", __file__) for each in raised.traceback
        )
    else:
        hook = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            svi.step(*data)
        hook.remove()
    torch.testing.assert_close(states(model, guide), before, rtol=0, atol=0)
    svi.step(*data)


def test_an_interrupted_step_leaves_no_gradients():
    guide, _, svi, data = compiled()
    weight = next(guide.parameters())
    hook = weight.register_hook(interrupt)
    before = states(guide.model, guide)
    with pytest.raises(KeyboardInterrupt):
        svi.step(*data)
    hook.remove()
    torch.testing.assert_close(states(guide.model, guide), before, rtol=0, atol=0)
    assert all(each.grad is None for each in (*guide.parameters(), *guide.model.parameters()))


def test_a_replay_that_fails_where_python_does_not_is_named(monkeypatch):
    other, _, whole, data = compiled()
    expected = [whole.step(*data) for _ in range(6)]
    guide, _, svi, data = compiled()
    losses = [svi.step(*data) for _ in range(5)]
    with monkeypatch.context() as patched:
        patched.setattr(ReplayedStep, "__call__", refuse)
        losses.append(svi.step(*data))
    assert losses == expected
    torch.testing.assert_close(states(guide), states(other), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="cannot be compiled: its replay raises: a kernel"):
        svi.step(*data)


def test_a_fit_goes_on_by_python_after_a_replay_that_fails(monkeypatch):
    model, data = with_statistics(), regression_data()
    guide, replay, failed = ps.MeanFieldGuide(model), ReplayedStep.__call__, []

    def fail_late(step, *args):
        if step.taken == 4 + TIMED + 1:
            failed.append(step)
            refuse()
        return replay(step, *args)

    monkeypatch.setattr(ReplayedStep, "__call__", fail_late)
    history = ps.fit(model, guide, data, num_steps=120, progress=False, compiled="traced")
    assert len(failed) == 1
    assert len([note for note in history.compilation if "its replay raises: a kernel" in note]) == 1


def refuse(*args):
    raise RuntimeError("a kernel")
