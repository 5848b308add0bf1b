"""Checkpoints of a fit: what goes on from one is, bit for bit, what was never interrupted."""

import os
import signal
import time
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.utils.data import DataLoader, IterableDataset

import pyro_structvi as ps
from pyro_structvi.infer.data import feed
from pyro_structvi.infer.steps.eager import EagerStep
from tests.infer.checkpointed_runs import (
    DATA,
    STEPS,
    Noisy,
    assert_same,
    make_data,
    make_model,
    train,
    until,
)
from tests.models import linear_function


class Drawn(IterableDataset):
    """Draws its order at each start, and says a wrong length."""

    def __iter__(self):
        yield from (make_data()[0][i] for i in torch.randperm(25).tolist())

    def __len__(self):
        return 50


KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "workers")) for kind in DATA]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_bit_for_bit_from_every_step(kind, path):
    """Fits in several parts, with models that start elsewhere, are the fit in one part."""
    expected = train(kind=kind)
    stops = [4, STEPS] if kind == "workers" else [1, 2, 3, 4, 8, STEPS]
    for seed, stop in enumerate(stops):
        found = train(stop, kind, seed, checkpoint=path, every=3, resume=True)
        assert len(found["elbo"]) == stop
    assert_same(found, expected)


def test_an_iterable_dataset_goes_on_whatever_length_it_says(path):
    def fit(steps, **options):
        pyro.set_rng_seed(0)
        model = make_model()
        guide = ps.MAPGuide(model)
        batches = [DataLoader(Drawn(), batch_size=10)]
        data = [{"x": x, "y": x.sum(-1, keepdim=True)} for x in batches[0]]
        options |= {"num_steps": steps, "lr_schedule": None, "kl_weight": 1.0, "progress": False}
        return ps.fit(model, guide, data, **options).elbo

    expected = fit(7)
    fit(3, checkpoint=path)
    assert fit(7, checkpoint=path, resume=True) == expected


@pytest.mark.parametrize("kind", ["shuffled", "seeded", "own"])
def test_what_a_thread_has_loaded_ahead_comes_back(kind, path, monkeypatch):
    """As on a GPU; the thread and the step must not draw from one generator at once, so it waits."""

    class Waiting(feed.OneAhead):
        def start(self):
            super().start()
            self.wait()

    monkeypatch.setattr(feed, "OneAhead", Waiting)
    monkeypatch.setattr(feed, "_are_copied", lambda *_: True)
    monkeypatch.setattr(
        feed, "_copies", lambda batches, _: (feed._arguments(each, lambda v: v) for each in batches)
    )
    expected = train(kind=kind)
    for stop in (1, 2, 3, 5, 6):
        with pytest.raises(ZeroDivisionError):
            train(
                kind=kind,
                seed=stop - 1,
                checkpoint=path,
                every=1,
                resume=True,
                lr_schedule=until(stop),
            )
    assert_same(train(kind=kind, checkpoint=path, every=1, resume=True), expected)


@pytest.mark.parametrize(("stop", "loaded"), [(3, 25), (4, 25), (6, 0)])
def test_no_more_is_loaded_again_than_the_pass_needs(stop, loaded, path, monkeypatch):
    """Of three batches a pass: none of one that had come to its end, and all of one that had not."""
    train(stop, "epochs", checkpoint=path)
    seen, original = [], Noisy.__getitem__
    monkeypatch.setattr(Noisy, "__getitem__", lambda *args: seen.append(1) or original(*args))
    train(max(6, stop), "epochs", checkpoint=path, resume=True)
    assert len(seen) == (loaded or 10), "a batch for the guide to find its sites by"


def test_checkpoints_change_nothing(path):
    assert_same(train(checkpoint=path, every=2), train())


def test_a_finished_run_returns_what_it_was(path):
    expected = train(checkpoint=path)
    assert_same(train(seed=3, checkpoint=path, resume=True), expected)


def test_an_error_loses_the_steps_since_the_last_checkpoint_alone(path):
    with pytest.raises(ZeroDivisionError):
        train(checkpoint=path, every=3, lr_schedule=until(8))
    assert torch.load(path, weights_only=True)["steps"] == 6
    assert_same(train(seed=1, checkpoint=path, resume=True), train())


def test_a_run_that_was_killed_before_the_first_interval_has_its_start(path):
    with pytest.raises(ZeroDivisionError):
        train(checkpoint=path, lr_schedule=until(2))
    assert torch.load(path, weights_only=True)["steps"] == 0
    assert_same(train(seed=1, checkpoint=path, resume=True), train())


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
@pytest.mark.parametrize("guide", [AutoNormal, ps.KTiedGuide, ps.EnsembleGuide])
def test_guides_of_functions_and_of_pyro_go_on(guide, path):
    def fit(steps, seed=0, model=linear_function, **options):
        pyro.clear_param_store()  # in which Pyro's guides find each other's parameters
        pyro.set_rng_seed(seed)
        own = guide(model)
        x, y = make_data()
        data = x, y.repeat(1, 2)
        options |= {"num_particles": 2, "lr_schedule": None, "kl_weight": 1.0, "progress": False}
        ps.fit(model, own, data, num_steps=steps, **options)
        return own.state_dict()

    expected = fit(6)
    fit(4, checkpoint=path)
    found = fit(6, seed=1, checkpoint=path, resume=True)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.RMSprop,
        partial(torch.optim.AdamW, amsgrad=True),
    ],
)
def test_other_optimizers_go_on(optimizer, path):
    expected = train(optimizer=optimizer, lr=1e-3)
    train(5, optimizer=optimizer, lr=1e-3, checkpoint=path)
    found = train(seed=1, optimizer=optimizer, lr=1e-3, checkpoint=path, resume=True)
    assert_same(found, expected)


def test_a_user_loads_guide_and_model_from_the_file(path):
    expected = train(checkpoint=path)
    model = make_model()
    guide = ps.KTiedGuide(model)
    state = torch.load(path, weights_only=True)
    guide.load_state_dict(state["guide"])
    model.load_state_dict(state["model"])
    for name, value in guide.state_dict().items():
        assert torch.equal(value, expected[f"guide.{name}"])


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
    assert len(train(checkpoint=path)["elbo"]) == 6
    assert torch.load(path, weights_only=True)["steps"] == 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(train(seed=1, checkpoint=path, resume=True), expected)


def test_a_second_interrupt_does_not_wait(path, monkeypatch, usual_interrupts):
    def interrupted(self, *batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(EagerStep, "take", interrupted)
    assert train(checkpoint=path)["elbo"] == []
