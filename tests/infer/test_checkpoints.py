"""Checkpoints of a fit: what goes on from one is, bit for bit, what was never interrupted."""

import multiprocessing
import os
import random
import signal
import time
from functools import partial

import numpy as np
import pyro
import pytest
import torch
import torch.distributed as dist
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay
from pyro_structvi.infer.data import feed
from pyro_structvi.infer.runs import checkpoint
from pyro_structvi.infer.steps.eager import EagerStep
from tests.infer.two_ranks import on_two_ranks
from tests.models import linear_function, make_regressor, regression_data

PROCESSES = multiprocessing.get_context("forkserver")
STEPS = 11  # of three batches an epoch


class Counting(nn.Module):
    """Adds what its calls count, in a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 0.01
        return x + self.calls


def make_model():
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), Counting(), nn.Dropout(0.2)]
    net = nn.Sequential(*layers, nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=False), 25, 0.3)


def make_data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(25, 3, generator=generator)
    return x, x.sum(-1, keepdim=True)


class Noisy(TensorDataset):
    """Draws from each of the global generators for each example."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        scale = 1 + 0.1 * (torch.rand(()).item() + random.random() + np.random.rand())  # noqa: NPY002
        return scale * x, y


class Drawn(IterableDataset):
    """Draws its order at each start, and says a wrong length."""

    def __iter__(self):
        yield from (make_data()[0][i] for i in torch.randperm(25).tolist())

    def __len__(self):
        return 50


class Batches:
    """An iterable of the user's own, whose pass is longer than it says."""

    def __iter__(self):
        for chosen in torch.randperm(25).split(7):
            yield {"x": make_data()[0][chosen], "y": make_data()[1][chosen]}

    def __len__(self):
        return 3


def noisy(x, y):
    return Noisy(x, y)


def loader(**options):
    return lambda x, y: DataLoader(Noisy(x, y), batch_size=10, **options)


def seeded(x, y):
    return DataLoader(
        Noisy(x, y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(8)
    )


def distributed(x, y):
    data = Noisy(x, y)
    return DataLoader(data, batch_size=10, sampler=DistributedSampler(data, 1, 0, seed=4))


DATA = {
    "all at once": (lambda x, y: (x, y), None),
    "tensors": (lambda x, y: (x, y), 10),
    "dataset": (noisy, 10),
    "shuffled": (loader(shuffle=True), None),
    "seeded": (seeded, None),
    "epochs": (distributed, None),
    "list": (lambda x, y: [(x[:10], y[:10]), (x[10:], y[10:]), (x[:3], y[:3])], None),
    "own": (lambda x, y: Batches(), None),
    "workers": (loader(shuffle=True, num_workers=2), None),
}
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "workers")) for kind in DATA]


def train(steps=STEPS, kind="tensors", seed=0, **options):
    """Fit, and return all that the fit has changed."""
    pyro.set_rng_seed(seed)
    model = make_model()
    guide = ps.KTiedGuide(model)
    wrap, batch_size = DATA[kind]
    schedules = {"lr_schedule": CosineDecay(20, 0.1), "kl_weight": ps.LinearAnnealing(8)}
    options = {"lr": 0.05, "batch_size": batch_size, "progress": False} | schedules | options
    history = ps.fit(model, guide, wrap(*make_data()), num_steps=steps, **options)
    history.compilation.clear()  # which says when, by measured times
    return {
        **{f"guide.{name}": value for name, value in guide.state_dict().items()},
        **{f"model.{name}": value for name, value in model.state_dict().items()},
        "calls": model.net[3].calls,
        **{name: values for name, values in vars(history).items() if isinstance(values, list)},
        "next": [torch.rand(()).item(), random.random(), np.random.rand()],  # noqa: NPY002
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert is_same(found[name], value), name


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
        options |= {"num_steps": steps, "lr_schedule": None, "progress": False}
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


def until(stop):
    """Return a schedule that raises before a step."""
    return lambda step: 1 / 0 if step == stop else CosineDecay(20, 0.1)(step)


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
        options |= {"num_particles": 2, "lr_schedule": None, "progress": False}
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
    assert kill_at_random_times(path, 40, 3) >= 2


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


# ---- bad input -----------------------------------------------------------------------------------


def fit(guide=ps.KTiedGuide, size=25, model=None, **options):
    pyro.set_rng_seed(0)
    model = make_regressor(size) if model is None else model()
    own = guide(model)
    before = {name: value.clone() for name, value in own.state_dict().items()}
    options = {"batch_size": 10, "num_steps": 4, "progress": False, "lr": 0.1} | options
    options = {"lr_schedule": None, "optimizer": torch.optim.Adam} | options
    data = options.pop("data", regression_data(size))
    randomness = torch.get_rng_state()
    try:
        ps.fit(model, own, data, **options)
    finally:
        is_same = all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
        fit.changed = not is_same or not torch.equal(randomness, torch.get_rng_state())


class Frozen(ps.KTiedGuide):
    def __init__(self, model):
        super().__init__(model)
        self["net.0.bias"].loc.requires_grad_(False)


def wide():
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0), 25, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5}, "the number of mini-batches in `data` is 5 here, and 3 in"),
        ({"batch_size": 9}, "`batch_size` is 9 here, and 10 in"),
        ({"size": 24}, "the number of examples in `data` is 24 here, and 25 in"),
        (
            {"data": TensorDataset(*regression_data(25))},
            "the kind of `data` is 'DataLoader' here, and 'TensorBatches' in",
        ),
        ({"num_particles": 2}, "`num_particles` is 2 here, and 1 in"),
        ({"num_steps": 3}, "`num_steps` must be at least the 4 steps that `checkpoint` has"),
        ({"lr": 0.2}, "learning rate of `lr` and `lr_schedule` at step 0 is 0.2 here, and 0.1 in"),
        (
            {"lr_schedule": lambda step: 1.0 if step < 3 else 0.5},
            "learning rate of `lr` and `lr_schedule` at step 3 is 0.05 here, and 0.1 in",
        ),
        ({"kl_weight": 0.5}, "`kl_weight` at step 0 is 0.5 here, and 1.0 in"),
        ({"optimizer": torch.optim.SGD}, "`optimizer` is 'SGD' here, and 'Adam' in"),
        (
            {"optimizer": partial(torch.optim.Adam, weight_decay=0.1)},
            "option `weight_decay` of `optimizer` is 0.1 here, and 0 in",
        ),
        ({"guide": partial(ps.KTiedGuide, rank=3)}, "rank = 2 instead of 3 at the site 'net.0"),
        ({"guide": ps.MAPGuide}, "family = KTied instead of PointEstimate"),
        ({"guide": Frozen}, "the parameters that are trained"),
        ({"model": wide}, r"'.*weight.loc' is \(6, 3\) of torch.float64 here and \(5, 3\)"),
        (
            {"model": lambda: make_regressor(25).float()},
            "is .* of torch.float32 here and .* of torch.float64",
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(options, message, path):
    fit(checkpoint=path)
    if "model" in options and "float32" in message:
        options |= {"data": tuple(value.float() for value in regression_data(25))}
    with pytest.raises((ValueError, RuntimeError), match=message) as raised:
        fit(checkpoint=path, resume=True, **options)
    assert not fit.changed
    notes = getattr(raised.value, "__notes__", [])
    assert "`checkpoint`" in "".join([str(raised.value), *notes])
    fit(checkpoint=path, resume=True)
    assert fit.changed


def test_a_file_that_is_there_is_not_overwritten(path):
    fit(checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"must be a new file.*Pass `resume=True`"):
        fit(checkpoint=path)
    assert path.read_bytes() == before


def test_paths_that_cannot_be_written_to(tmp_path):
    for wrong in (tmp_path, tmp_path / "missing" / "run.pt", ""):
        with pytest.raises(ValueError, match="`checkpoint` must be the path of a file in a folder"):
            fit(checkpoint=wrong)


@pytest.mark.parametrize("content", [b"", b"text", "guide", "cut"])
def test_files_that_are_no_checkpoints(content, path):
    if content == "guide":
        torch.save(ps.KTiedGuide(make_regressor()).state_dict(), path)
    elif content == "cut":
        fit(checkpoint=path)
        path.write_bytes(path.read_bytes()[:-500])
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="`checkpoint` must be a file that `fit` has written"):
        fit(checkpoint=path, resume=True)


def test_resume_needs_a_path():
    with pytest.raises(ValueError, match="`resume=True` needs `checkpoint`"):
        fit(resume=True)


def test_a_full_disk_leaves_the_last_checkpoint(path, monkeypatch):
    fit(checkpoint=path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match=r"`checkpoint` could not be written .* No space left"):
        fit(checkpoint=path, resume=True, num_steps=9)
    assert path.read_bytes() == before
    assert [*path.parent.iterdir()] == [path]


class Odd(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"odd": object()}


def test_a_state_that_no_file_can_hold_is_refused_before_the_first_step(path):
    with pytest.raises((OSError, TypeError), match="`optimizer` must have a state of tensors"):
        fit(checkpoint=path, optimizer=Odd)
    assert not fit.changed


def test_numbers_of_numpy_are_kept_as_numbers(path):
    fit(checkpoint=path, lr=np.float64(0.1), lr_schedule=lambda step: np.float64(0.5))
    fit(checkpoint=path, lr=0.05, resume=True, num_steps=6)
