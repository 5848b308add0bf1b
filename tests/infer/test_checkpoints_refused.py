"""Checkpoints that do not belong to a run, or cannot be read or written."""

from functools import partial

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pyro_structvi as ps
from pyro_structvi.infer import checkpoint
from tests.infer.checkpointed_runs import fit
from tests.models import make_regressor, regression_data


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


# ---- bad input -----------------------------------------------------------------------------------


class Frozen(ps.KTiedGuide):
    def __init__(self, model):
        super().__init__(model)
        self["net.0.weight"].loc.requires_grad_(False)


def wide():
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0), 25, 0.3)


def with_relu():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0), 25, 0.3)


def with_laplace():
    return make_regressor(25, prior=dist.Laplace(0.0, 1.0))


def with_outliers():
    return ps.Regressor(make_regressor().net, 25, 0.3, df=4.0)


def one_scale_for_each_target():
    return ps.Regressor(make_regressor().net, 25, torch.tensor([0.3]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5}, "the number of mini-batches in `data` is 5 here, and 3 in"),
        ({"size": 24}, "the number of examples in `data` is 24 here, and 25 in"),
        (
            {"data": TensorDataset(*(value.double() for value in regression_data(25)))},
            "the kind of `data` is 'DataLoader' here, and 'TensorBatches' in",
        ),
        (
            {"elbo": ps.StructuredELBO(num_particles=2)},
            "`num_particles` of `elbo` is 2 here, and 1 in",
        ),
        ({"num_steps": 3}, "`num_steps` must be at least the 4 steps that `checkpoint` has"),
        ({"lr": 0.1}, "`lr` is 'a number or None' here, and 'a function' in"),
        (
            {"lr": lambda step: 0.1 if step < 3 else 0.05},
            "the learning rate at step 3 is 0.05 here, and 0.1 in",
        ),
        ({"kl_weight": 0.5}, "`kl_weight` at step 0 is 0.5 here, and 1.0 in"),
        (
            {"kl_weight": "annealed"},
            "`kl_weight` is 'annealed' here, and 'a number or a function' in",
        ),
        ({"optimizer": torch.optim.SGD}, "`optimizer` is 'SGD' here, and 'Adam' in"),
        (
            {"optimizer": partial(torch.optim.Adam, weight_decay=0.1)},
            "option `weight_decay` of `optimizer` in group 0 is 0.1 here, and 0 in",
        ),
        (
            {"optimizer": lambda parameters, lr: torch.optim.Adam(parameters[::-1], lr=lr)},
            r"the parameters of groups of `optimizer` is \[\['guide.posteriors.net/2/.*\]\] here, and",
        ),
        ({"guide": partial(ps.KTiedGuide, rank=3)}, "rank = 2 instead of 3 at the site 'net.0"),
        (
            {"guide": Frozen},
            r"the parameters that are trained is \[.*\] here, and \[.*0/weight.loc",
        ),
        (
            {"model": lambda: make_regressor(25, prior=2.0)},
            "`net.0.weight_prior_scale` of the model has other values here than in",
        ),
        (
            {"model": lambda: make_regressor(25, noise_scale=0.2)},
            "`noise_scale` of the model has other values here than in",
        ),
        ({"model": wide}, r"'model.net.0' has out_features 5 in the file and 6 here"),
        ({"model": with_relu}, r"'model.net.1' has class Tanh in the file and ReLU here"),
        (
            {"model": with_laplace},
            r"'model.net.0' has prior of weight Normal in the file and Laplace",
        ),
        ({"model": with_outliers}, r"'model' has df None in the file and 4.0 here"),
        ({"model": one_scale_for_each_target}, r"size mismatch for noise_scale"),
        (
            {
                "model": lambda: make_regressor(25).float(),
                "data": tuple(value.float() for value in regression_data(25)),
            },
            r"dtypes is \['torch.float32'\] here, and \['torch.float64'\] in",
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(options, message, path):
    fit(checkpoint=ps.Checkpoint(path))
    before = path.read_bytes()
    with pytest.raises((ValueError, RuntimeError), match=message) as raised:
        fit(checkpoint=ps.Checkpoint(path, resume=True), **options)
    assert not fit.changed
    notes = getattr(raised.value, "__notes__", [])
    assert "`checkpoint`" in "".join([str(raised.value), *notes])
    assert path.read_bytes() == before


def test_a_file_that_is_there_is_not_overwritten_and_others_cannot_be(path, tmp_path):
    fit(checkpoint=ps.Checkpoint(path))
    before = path.read_bytes()
    with pytest.raises(
        FileExistsError, match=r"must be a new file.*`Checkpoint\(path, resume=True\)`"
    ):
        fit(checkpoint=ps.Checkpoint(path))
    assert path.read_bytes() == before
    for wrong in (tmp_path, tmp_path / "missing" / "run.pt", ""):
        with pytest.raises(ValueError, match="`checkpoint` must be the path of a file in a folder"):
            fit(checkpoint=ps.Checkpoint(wrong))


def test_files_that_are_no_checkpoints(path):
    fit(checkpoint=ps.Checkpoint(path))
    cut = path.read_bytes()[:-500]
    torch.save(ps.KTiedGuide(make_regressor()).state_dict(), path)
    for content in (path.read_bytes(), cut, b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="`checkpoint` must be a file that `fit` has written"):
            fit(checkpoint=ps.Checkpoint(path, resume=True))


def test_a_full_disk_leaves_the_last_checkpoint(path, monkeypatch):
    fit(checkpoint=ps.Checkpoint(path))
    before = path.read_bytes()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match=r"`checkpoint` could not be written .* No space left"):
        fit(checkpoint=ps.Checkpoint(path, resume=True), num_steps=9)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


class Odd(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"odd": object()}


def test_a_state_that_no_file_can_hold_is_refused_before_the_first_step(path):
    with pytest.raises((OSError, TypeError), match="`optimizer` must have a state of tensors"):
        fit(checkpoint=ps.Checkpoint(path), optimizer=Odd)
    assert not fit.changed


def test_numbers_of_numpy_are_kept_as_numbers(path):
    fit(checkpoint=ps.Checkpoint(path), lr=lambda step: np.float64(0.05))
    fit(checkpoint=ps.Checkpoint(path, resume=True), lr=lambda step: 0.05, num_steps=6)
