"""Steps that end by an error or an interrupt: nothing is half changed, and training goes on as before."""

import pyro
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.infer.steps.replayed import ReplayedStep
from tests.infer.test_checked_steps import states, with_statistics
from tests.models import regression_data


def compiled(model=None, fused=True):
    """Return guide, optimizer and traced steps of a model with running statistics, and its data."""
    pyro.set_rng_seed(0)
    model, data = model or with_statistics(), regression_data()
    guide = ps.KTiedGuide(model)
    guide.initialize(*data)
    optimizer = torch.optim.Adam([*guide.parameters(), *model.parameters()], lr=0.01, fused=fused)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    return guide, optimizer, svi, data


@pytest.mark.parametrize("name", ["_differentiate", "_record_update", "_update"])
def test_an_interrupted_record_is_made_again(name, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    guide, _, svi, data = compiled()
    losses = [svi.step(*data) for _ in range(2)]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ReplayedStep, name, interrupt)
        svi.step(*data)
    losses += [svi.step(*data) for _ in range(6)]
    other, _, svi, data = compiled()
    assert losses == [svi.step(*data) for _ in range(8)]
    torch.testing.assert_close(states(guide), states(other), rtol=0, atol=0)
