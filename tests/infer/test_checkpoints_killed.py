"""Checkpoints of runs that are killed, and of several processes."""

import multiprocessing
import os
import random
import signal
import time

import pyro
import pytest
import torch
import torch.distributed as dist

from pyro_structvi.infer.runs import checkpoint
from tests.infer.checkpointed_runs import STEPS, assert_same, train, until
from tests.infer.two_ranks import on_two_ranks

PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


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
    found = train(steps, seed=seed, checkpoint=path, every=1, resume=True)
    torch.save(found, path.with_name("found.pt"))


def kill_at_random_times(path, steps, most):
    chance, seed = random.Random(3), 0
    while not path.with_name("found.pt").exists():
        process = start(train_and_save, path, steps, seed)
        if seed < most:
            while not path.exists() and process.is_alive():
                time.sleep(0.001)
            time.sleep(chance.uniform(0.0, 0.15))
            process.kill()
        process.join()
        seed += 1
    assert_same(torch.load(path.with_name("found.pt")), train(steps))
    return seed


def test_a_run_that_is_killed_again_and_again_is_the_run_in_one_part(path):
    assert kill_at_random_times(path, 40, 2) >= 2


@pytest.mark.slow
def test_a_run_that_is_killed_many_times_is_the_run_in_one_part(path):
    assert kill_at_random_times(path, 600, 30) >= 10


def train_and_die(path, where, count):
    """Kill this process within its write of a checkpoint, at the time of this number."""
    left = [count]

    def dies():
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def half(state, file):
        before = file.tell()
        original["save"](state, file)
        size = file.tell()
        if left[0] == 1:
            file.truncate(before + size // 2)
            file.flush()
        dies()

    def replace(*paths):
        if where == "before":
            dies()
        original["replace"](*paths)
        if where == "after":
            dies()

    original = {"save": torch.save, "replace": os.replace}
    checkpoint.torch.save = half if where == "middle" else torch.save
    checkpoint.os.replace = replace
    train_and_save(path, STEPS, int(path.exists()))


@pytest.mark.parametrize("where", ["middle", "before", "after"])
def test_a_write_that_is_killed_leaves_the_file_whole(where, path):
    expected = train()
    for count in (1, 4):  # of a new run the first, of the one that goes on the fourth
        process = start(train_and_die, path, where, count)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if path.exists():
            assert torch.load(path, weights_only=True)["steps"] <= 4
    assert_same(train(seed=2, checkpoint=path, resume=True), expected)
    assert not path.with_name("run.pt.partial").exists()


# ---- several processes ---------------------------------------------------------------------------


def train_in_parts(path, kind):
    expected = train(9, kind, seed=dist.get_rank())
    for seed, stop in enumerate((2, 5)):
        try:
            options = {"checkpoint": path, "every": 1, "resume": True}
            train(9, kind, seed=7 * seed + dist.get_rank(), lr_schedule=until(stop), **options)
        except ZeroDivisionError:
            pass
    found = train(9, kind, seed=4, checkpoint=path, every=4, resume=True)
    return expected, found


@pytest.mark.parametrize("kind", ["tensors", pytest.param("shuffled", marks=pytest.mark.slow)])
def test_two_ranks_go_on_bit_for_bit(kind, tmp_path):
    """The generators of each rank come back, those that are there after the fit too."""
    both = on_two_ranks(train_in_parts, tmp_path, tmp_path / "run.pt", kind)
    for expected, found in both:
        assert_same(found, expected)
    assert both[0][1]["elbo"] == both[1][1]["elbo"]


def fit_with_other_ranks(path):
    try:
        train(checkpoint=path, resume=True)
    except ValueError as error:
        return str(error)


def fit_to_a_full_disk(path):
    checkpoint.os.replace = lambda *_: 1 / 0
    try:
        train(checkpoint=path)
    except OSError as error:
        return str(error)


def in_two_ranks(path):
    return fit_with_other_ranks(path), fit_to_a_full_disk(path.with_name("new.pt"))


def test_errors_are_raised_on_all_ranks(tmp_path):
    train(checkpoint=tmp_path / "run.pt")
    both = on_two_ranks(in_two_ranks, tmp_path, tmp_path / "run.pt")
    assert both[0] == both[1]
    assert "the number of processes is 2 here, and 1 in" in both[0][0]
    assert "could not be written" in both[0][1]
