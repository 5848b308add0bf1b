"""Schedules and counts of a ``StructuredModule`` where a run is resumed, or another optimizer is made."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps

pytest.importorskip("lightning")
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.test_lightning import QUIET, SIZE, loader, make, state_of, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


def equal_batches():
    """Return a loader of equal mini-batches, since Lightning begins the data again."""
    parts = (value[:8].repeat(3, 1) for value in loader().dataset.tensors)
    return DataLoader(TensorDataset(*parts), batch_size=8)


def resume(module, path):
    trainer = Trainer(**QUIET, max_epochs=2)
    trainer.fit(module, equal_batches(), ckpt_path=path / "run.ckpt")
    return trainer


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path):
    whole, other = make(ps.MAPGuide), make(ps.MAPGuide)
    saves = ModelCheckpoint(tmp_path, "run", every_n_train_steps=4)
    train(whole, equal_batches(), callbacks=[saves], enable_checkpointing=True)
    assert resume(other, tmp_path).global_step == 6
    assert other.model.num_data == SIZE
    torch.testing.assert_close(state_of(other), state_of(whole), rtol=1e-12, atol=0)
