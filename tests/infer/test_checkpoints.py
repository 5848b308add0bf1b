"""Checkpoints of a fit: what goes on from one is, bit for bit, what was never interrupted."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

import pyro_structvi as ps
from pyro_structvi.infer import checkpoint
from pyro_structvi.infer.steps.eager import EagerStep
from tests.infer.checkpointed_runs import (
    DATA,
    STEPS,
    assert_same,
    make_data,
    make_model,
    train,
    until,
)
from tests.infer.two_ranks import PRELOADED
from tests.models import linear_function, make_linear_regressor, regression_data

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(PRELOADED)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k == "dataset" else pytest.mark.slow) for k in DATA],
)
def test_it_goes_on_bit_for_bit_from_every_step(kind, path):
    """Fits in several parts, with models that start elsewhere, are the fit in one part.

    The last part finds the fit finished.
    """
    expected = train(kind=kind)
    for seed, stop in enumerate([1, 2, 3, 4, 8, STEPS, STEPS]):
        run = ps.Checkpoint(path, every=3, resume=True)
        found = train(stop, kind, seed, checkpoint=run)
        assert len(found["elbo"]) == stop
    assert_same(found, expected)


class Recorded:
    """Mini-batches of the user's own, which write down the order in which they are loaded."""

    def __iter__(self):
        x, y = make_data()
        for number, chosen in enumerate(torch.arange(25).split(10)):
            self.seen.append(number)
            yield x[chosen], y[chosen]

    def __len__(self):
        return 3


@pytest.mark.parametrize(("stop", "seen"), [(3, [0, 1, 2]), (4, [0, 1, 2, 0, 1])])
def test_a_loader_of_others_begins_its_epoch_again(stop, seen, path):
    batches, model = Recorded(), make_model()
    guide = ps.KTiedGuide(model)
    options = {"kl_weight": 1.0, "lr": lambda step: 0.01, "progress": False}
    batches.seen = []
    run = ps.Checkpoint(path, resume=True)
    ps.fit(model, guide, batches, num_steps=stop, checkpoint=run, **options)
    batches.seen = []
    history = ps.fit(model, guide, batches, num_steps=stop + len(seen), checkpoint=run, **options)
    assert batches.seen == seen
    assert len(history.elbo) == stop + len(seen)


@pytest.mark.parametrize(("every", "stop", "kept"), [(3, 8, 6), (1000, 2, 0)])
def test_an_error_loses_the_steps_since_the_last_checkpoint_alone(every, stop, kept, path):
    """Before the first interval has passed, that is the start."""
    with pytest.raises(ZeroDivisionError):
        train(checkpoint=ps.Checkpoint(path, every=every), lr=until(stop))
    assert torch.load(path, weights_only=True)["steps"] == kept
    assert_same(train(seed=1, checkpoint=ps.Checkpoint(path, resume=True)), train())


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
@pytest.mark.parametrize("guide", [AutoNormal, ps.KTiedGuide, ps.EnsembleGuide])
def test_guides_of_functions_and_of_pyro_go_on(guide, path):
    def fit(steps, seed=0, model=linear_function, **options):
        pyro.clear_param_store()  # in which Pyro's guides find each other's parameters
        pyro.set_rng_seed(seed)
        own = guide(model)
        x, y = make_data()
        data = x, y.repeat(1, 2)
        options |= {"elbo": ps.StructuredELBO(num_particles=2), "lr": lambda step: 0.01}
        options |= {"kl_weight": 1.0, "progress": False}
        ps.fit(model, own, data, num_steps=steps, **options)
        return own.state_dict()

    expected = fit(6)
    fit(4, checkpoint=ps.Checkpoint(path))
    found = fit(6, seed=1, checkpoint=ps.Checkpoint(path, resume=True))
    assert_same(found, expected)


@pytest.mark.parametrize("guide", [ps.RowwiseGuide, ps.FullCovarianceGuide, ps.EigenbasisGuide])
def test_longer_runs_are_one_run_if_no_schedule_depends_on_the_number_of_steps(guide, path):
    def fit(steps, **options):
        pyro.set_rng_seed(0)
        model = make_linear_regressor()
        own = guide(model)
        make = partial(ps.StructuredAdam, guide=own, warm_up=4)
        options |= {"num_steps": steps, "optimizer": make, "lr": lambda step: 0.1}
        ps.fit(model, own, regression_data(), kl_weight=1.0, progress=False, **options)
        return own.state_dict()

    fit(3, checkpoint=ps.Checkpoint(path))
    assert_same(fit(6, checkpoint=ps.Checkpoint(path, resume=True)), fit(6))


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, momentum=0.9),
        pytest.param(torch.optim.RMSprop, marks=pytest.mark.slow),
        partial(torch.optim.AdamW, amsgrad=True),
    ],
)
def test_other_optimizers_go_on(optimizer, path):
    options = {"optimizer": optimizer, "lr": lambda step: 1e-3}
    expected = train(**options)
    train(5, checkpoint=ps.Checkpoint(path), **options)
    assert_same(train(seed=1, checkpoint=ps.Checkpoint(path, resume=True), **options), expected)


@pytest.fixture
def usual_interrupts():
    """A process in the background of a shell ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_step_and_keeps_it(path, monkeypatch, usual_interrupts):
    expected, original = train(), EagerStep.take

    def interrupted(self, *batch):
        if self.loss.elbo.step == 5 and not path.with_name("once").exists():
            path.with_name("once").touch()
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *batch)

    monkeypatch.setattr(EagerStep, "take", interrupted)
    assert len(train(checkpoint=ps.Checkpoint(path))["elbo"]) == 6
    assert torch.load(path, weights_only=True)["steps"] == 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(train(seed=1, checkpoint=ps.Checkpoint(path, resume=True)), expected)


def test_an_interrupt_does_not_divide_an_update(monkeypatch, usual_interrupts):
    """StructuredAdam moves the groups of parameters one after the other."""
    expected, original = train(1), ps.StructuredAdam._adam

    def interrupted(self, *args):
        original(self, *args)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(ps.StructuredAdam, "_adam", original)

    monkeypatch.setattr(ps.StructuredAdam, "_adam", interrupted)
    assert_same(train(), expected)


def test_a_second_interrupt_does_not_wait(path, monkeypatch, usual_interrupts):
    def interrupted(self, *batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(EagerStep, "take", interrupted)
    for run in (ps.Checkpoint(path), None):
        assert train(checkpoint=run)["elbo"] == []


# ---- killed --------------------------------------------------------------------------------------


def start(function, *args):
    process = PROCESSES.Process(target=in_process, args=(function, *args))
    process.start()
    return process


def in_process(function, *args):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    pyro.enable_validation(True)
    function(*args)


def train_and_save(path, steps, seed):
    found = train(steps, seed=seed, checkpoint=ps.Checkpoint(path, every=1, resume=True))
    torch.save(found, path.with_name("found.pt"))


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_run_in_one_part(path):
    chance = random.Random(3)
    for seed in range(3):
        process = start(train_and_save, path, 40, seed)
        if seed < 2:
            while not path.exists() and process.is_alive():
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.15))
            process.kill()
        process.join()
    assert_same(torch.load(path.with_name("found.pt")), train(40))


class Killed(BaseException):
    """Raised where a process would be killed, after a copy of its files."""


def train_and_die(monkeypatch, path, where, count):
    """Train until this write of a checkpoint, and leave the files that a kill within it leaves."""
    left, folder = [count], path.parent
    disk = folder.with_name("disk")

    def dies():
        left[0] -= 1
        if not left[0]:
            shutil.copytree(folder, disk)
            raise Killed

    def half(state, partial):
        original["save"](state, partial)
        if left[0] == 1:
            os.truncate(partial, partial.stat().st_size // 2)
        dies()

    def replace(*paths):
        if where == "before":
            dies()
        original["replace"](*paths)
        if where == "after":
            dies()

    original = {"save": torch.save, "replace": os.replace}
    run = ps.Checkpoint(path, every=1, resume=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.torch, "save", half if where == "middle" else torch.save)
        patched.setattr(checkpoint.os, "replace", replace)
        with pytest.raises(Killed):
            train(seed=int(path.exists()), checkpoint=run)
    shutil.rmtree(folder)
    disk.rename(folder)


@pytest.mark.parametrize(
    "where", ["middle", pytest.param("before", marks=pytest.mark.slow), "after"]
)
def test_a_write_that_is_killed_leaves_the_file_whole(where, tmp_path, monkeypatch):
    expected, path = train(), tmp_path / "run" / "run.pt"
    path.parent.mkdir()
    for count in (1, 4):  # of a new run the first, of the one that goes on the fourth
        train_and_die(monkeypatch, path, where, count)
        left = [*path.parent.glob("run.pt.*.partial")]
        assert len(left) == (where != "after")
        for each in left:
            os.utime(each, (0, 0))  # long ago
        if path.exists():
            assert torch.load(path, weights_only=True)["steps"] <= 4
    assert_same(train(seed=2, checkpoint=ps.Checkpoint(path, resume=True)), expected)
    assert [*path.parent.iterdir()] == [path]
