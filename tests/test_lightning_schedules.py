"""Schedules and counts of a ``StructuredModule`` that is resumed, or whose optimizer is another."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps

pytest.importorskip("lightning")
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pyro_structvi.lightning import StructuredModule
from tests.test_lightning import QUIET, SIZE, Stream, loader, make, state_of, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


def equal_batches():
    """Return a loader of equal mini-batches, since Lightning begins the data again."""
    parts = (value[:8].repeat(3, 1) for value in loader().dataset.tensors)
    return DataLoader(TensorDataset(*parts), batch_size=8)


def resume(module, path, **options):
    trainer = Trainer(**QUIET, max_epochs=2, **options)
    trainer.fit(module, equal_batches(), ckpt_path=path)
    return trainer


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path):
    whole, other = make(ps.MAPGuide), make(ps.MAPGuide)
    saves = ModelCheckpoint(tmp_path, "run", every_n_train_steps=4)
    train(whole, equal_batches(), callbacks=[saves], enable_checkpointing=True)
    assert resume(other, tmp_path / "run.ckpt").global_step == 6
    assert other.model.num_data == SIZE
    torch.testing.assert_close(state_of(other), state_of(whole), rtol=1e-12, atol=0)


class OwnOptimizer(StructuredModule):
    """Has a fixed rate."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Weights(Callback):
    """Writes down the weight of the KL of each step."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        self.found.append(float(trainer.callback_metrics["kl_weight"]))


def make_own(**options):
    module = make(ps.MAPGuide)
    return OwnOptimizer(module.model, module.guide, **options)


def test_the_kl_is_annealed_where_the_user_makes_the_optimizer(tmp_path):
    """Over the first half of the steps, also where the run is resumed."""
    expected, weights, rest = [3 / 9, 5 / 9, 7 / 9, 1.0, 1.0, 1.0], Weights(), Weights()
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    train(make_own(), equal_batches(), callbacks=[saves, weights], enable_checkpointing=True)
    assert weights.found == pytest.approx(expected)
    resume(make_own(), tmp_path / "step=1.ckpt", callbacks=[rest])
    assert rest.found == pytest.approx(expected[1:])


def test_only_an_annealed_weight_needs_the_number_of_steps():
    for options in ({"kl_weight": 0.5}, {"elbo": ps.StructuredELBO(kl_weight=0.5)}, {}):
        module, weights = make_own(**options), Weights()
        module.model.num_data, module.model.is_num_data_given = SIZE, True
        trainer = Trainer(**QUIET, max_epochs=1, callbacks=[weights])
        with nullcontext() if options else pytest.raises(ValueError, match="without a length"):
            trainer.fit(module, DataLoader(Stream(), batch_size=8))
        assert weights.found == ([0.5] * 3 if options else [])
