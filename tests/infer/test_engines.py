"""The engines of fit: which way a step is taken, that it is the same step, and what is said of it."""

import itertools
import random
import re
from functools import partial
from itertools import product

import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay
from pyro_structvi.infer.steps import compiled as steps
from pyro_structvi.infer.steps.state import Modules
from pyro_structvi.linalg import matrices
from tests.guide_cases import GUIDES, POINTS
from tests.infer.test_training import make, snapshot, unchanged
from tests.models import make_linear_regressor, make_regressor, regression_data

FOREVER = 10**9


@pytest.fixture
def traced_fit(monkeypatch):
    """Let fit trace at once, however few steps are to come, and stay with it."""
    trace_at_once(monkeypatch.setattr)


def trace_at_once(set_attribute):
    set_attribute(steps, "STEPS_FOR_TRACING", 0)
    set_attribute(steps, "TIMED", 1000)


def ways(history):
    """Return what the notes of a fit begin with, behind the number of the step."""
    return [note.split(": ")[1].split()[0] for note in history.compilation]


# ---- the same step --------------------------------------------------------------------------------


def by_engines(make_guide, dtype=torch.float64, make_model=make_linear_regressor, **options):
    """Fit with eager steps and with those that fit chooses; return histories and states."""
    found = []
    for compiled in (False, "auto"):
        pyro.set_rng_seed(0)
        model = make_model(20).to(dtype)
        guide = make_guide(model)
        data = tuple(value.to(dtype) for value in regression_data(20))
        history = ps.fit(
            model,
            guide,
            data,
            compiled=compiled,
            progress=False,
            **{"lr": 0.1, "num_steps": 6} | options,
        )
        found.append((vars(history), snapshot(guide)))
    return found


def assert_same_bits(eager, own, notes=0):
    for name in ("elbo", "log_likelihood", "kl", "kl_weight", "lr"):
        assert own[0][name] == eager[0][name], name
    assert len(own[0]["compilation"]) == notes
    assert all(torch.equal(value, own[1][name]) for name, value in eager[1].items())


FAST = {
    ("k-tied, joined", torch.float64),
    ("inducing weights, full, not joined", torch.float32),  # which keeps what it has factored
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*each, marks=() if each in FAST else pytest.mark.slow)
        for each in product(GUIDES | POINTS, (torch.float64, torch.float32))
    ],
)
def test_a_fit_with_traced_steps_is_that_with_eager_ones_to_the_last_bit(
    name, dtype, traced_fit, monkeypatch
):
    """Large weights go by matrices."""
    monkeypatch.setattr(matrices, "BLOCK", 8)
    options = {"lr": CosineDecay(6, 0.05, 0.005), "kl_weight": ps.LinearAnnealing(5)}
    assert_same_bits(*by_engines((GUIDES | POINTS)[name], dtype, make_regressor, **options))


def test_batches_of_two_sizes_are_traced_apart(traced_fit):
    assert_same_bits(*by_engines(ps.MeanFieldGuide, batch_size=12))


def test_a_run_that_goes_on_is_the_same_to_the_last_bit(traced_fit, tmp_path):
    """Its steps are traced anew, after two eager ones, where the run in one part replays them."""

    def fit(num_steps, seed=0, **options):
        pyro.set_rng_seed(0)
        model, data = make_linear_regressor(20), regression_data(20)
        guide = ps.KTiedGuide(model)
        options |= {"lr": lambda step: 0.1, "kl_weight": 1.0, "progress": False}
        pyro.set_rng_seed(seed)
        history = ps.fit(model, guide, data, num_steps=num_steps, **options)
        return history.elbo, snapshot(guide)

    elbo, state = fit(8)
    checkpoint = ps.Checkpoint(tmp_path / "fit.pt", resume=True)
    fit(4, checkpoint=checkpoint)
    own_elbo, own_state = fit(8, seed=1, checkpoint=checkpoint)
    assert own_elbo == elbo
    assert all(torch.equal(value, own_state[name]) for name, value in state.items())


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_step_of_every_kind_is_checked_before_its_update(number, traced_fit):
    """A recorded step, one that is compared, and replayed ones."""
    model, (x, y) = make_linear_regressor(), regression_data()
    guide = ps.KTiedGuide(model)
    guide.initialize(x, y)
    bad = y.clone()
    bad[0] = float("nan")
    kept = {}

    class Batches(list):
        def __iter__(self):
            for _ in range(number):
                yield x, y
            kept.update(snapshot(guide))
            yield x, bad

    message = rf"At step {number}, the data \['argument 1'\] is not"
    with pytest.raises(FloatingPointError, match=message):
        ps.fit(model, guide, Batches([0] * 6), num_steps=6, progress=False)
    assert unchanged(guide, kept)


@pytest.mark.slow
def test_a_traced_step_names_the_sites_that_are_not_finite(traced_fit):
    model, guide, (x, y) = make()

    class Batches(list):
        def __iter__(self):
            for _ in range(4):
                yield x, y
            with torch.no_grad():
                guide["net.2.weight"].log_row_scale[0, 0] = 800.0  # exp overflows
            yield x, y

    with pytest.raises(FloatingPointError, match=r"At step 4, the (log|KL).*(obs|net\.2\.weight)"):
        ps.fit(model, guide, Batches([0] * 5), num_steps=5, progress=False)


# ---- what stays eager, and why --------------------------------------------------------------------


class Deciding(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out if out.sum() > 0 else -out  # the line at fault


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 100 else 2)


class Gambling(nn.Linear):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.5 else super().forward(-x)


class Asking(nn.Linear):
    """Asks an object of its own, which changes when it is asked."""

    def __init__(self, *sizes, what):
        super().__init__(*sizes)
        self.what = what()

    def forward(self, x):
        return super().forward(x) * (1 if self.what() else 2)


class Schedule:
    calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls < 100


def rarely():
    """Return a function that is seldom true, so that few steps would show it."""
    generator = random.Random(0)
    return generator.random


CALLS = itertools.count()


class CountingOutside(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 if next(CALLS) < 100 else 2)


class Counter:
    """As ``itertools.count`` is in Python 3.14: not pickled, and shown with its number."""

    number = 0

    def __next__(self):
        self.number += 1
        return self.number

    def __repr__(self):
        return f"Counter({self.number})"

    def __reduce__(self):
        raise TypeError


OTHER_CALLS = Counter()


class CountingByAnother(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 if next(OTHER_CALLS) < 100 else 2)


def hooked(*sizes):
    layer, norms = nn.Linear(*sizes), []
    layer.register_forward_hook(lambda module, args, out: norms.append(out.detach()))
    return layer


OBJECT = r"a step changes `what` of module \d+, a .*Asking, which a replay would not"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Deciding, r"reads a tensor's value, at .*test_engines\.py:\d+, `.*the line at fault`"),
        (Counting, r"a step changes `calls` of module \d+, a .*Counting, which a replay would not"),
        (Gambling, r"a step changes `state` of Python's `random`.*draw random numbers by torch"),
        (partial(Asking, what=Schedule), OBJECT),
        (partial(Asking, what=rarely), OBJECT),
        (
            CountingOutside,
            "a step changes `CALLS` of the variables outside, which a replay would not",
        ),
        (
            CountingByAnother,
            "a step changes `OTHER_CALLS` of the variables outside, which a replay would not",
        ),
        (hooked, "a step changes `norms` of the variables outside, which a replay would not"),
    ],
)
def test_what_cannot_be_replayed_stays_eager_and_the_history_says_why(layer, reason, traced_fit):
    def make_model(size):
        return ps.Regressor(ps.bayesianize(layer(3, 1), prior=1.0), size, noise_scale=0.3)

    eager, own = by_engines(ps.MeanFieldGuide, make_model=make_model, num_steps=8)
    assert_same_bits(eager, own, notes=1)
    (note,) = own[0]["compilation"]
    assert re.search(r"^Step \d: eager: .*" + reason, note), note


def test_a_setting_that_changes_between_steps_is_another_kind(traced_fit):
    """So does a number that a model closes over."""
    factor = 1.0
    inner = make_linear_regressor()

    def model(x, y):
        return inner(x * factor, y)

    x, y = regression_data()

    class Batches(list):
        def __iter__(self):
            nonlocal factor
            for step in range(8):
                factor = 1.0 if step < 5 else 3.0
                yield x, y

    def elbos(compiled):
        pyro.set_rng_seed(0)
        options = {"num_steps": 8, "compiled": compiled, "progress": False}
        return ps.fit(model, ps.MeanFieldGuide(model), Batches([0]), **options).elbo

    assert elbos("auto") == pytest.approx(elbos(False), rel=1e-9)


def test_arguments_that_cannot_be_compared_leave_steps_eager():
    model, _, (x, y) = make()

    def with_notes(x, y, notes):
        return model(x, y)

    own = ps.KTiedGuide(with_notes)
    data = [(x, y, {1, 2})]
    history = ps.fit(with_notes, own, data, num_steps=4, progress=False)
    assert ways(history) == ["eager"]
    assert "tensors or hashable" in history.compilation[0]


def test_many_kinds_leave_steps_eager(monkeypatch):
    assert steps.MOST_KINDS == 32
    monkeypatch.setattr(steps, "MOST_KINDS", 3)
    model = make_regressor(10)
    data = [tuple(value[:size] for value in regression_data(10)) for size in range(5, 10)]
    history = ps.fit(model, ps.KTiedGuide(model), data, num_epochs=30, progress=False)
    assert ways(history) == ["eager", *3 * ["traced"]]
    assert "more than 3 kinds" in history.compilation[0]


@pytest.mark.parametrize(
    "place", ["data", *(pytest.param(each, marks=pytest.mark.slow) for each in ("rate", "weight"))]
)
def test_a_fit_sees_what_other_code_changes_between_its_steps(place, traced_fit):
    """Replays ask for nothing where no such code runs; here the data grow in the middle."""

    def change(compiled):
        pyro.set_rng_seed(0)
        model, count = make_linear_regressor(20), iter(range(999))
        guide = ps.KTiedGuide(model)

        def grow(step=None):
            model.num_data = 20 if (next(count) if step is None else step) < 24 else 1000
            return 1.0

        class Growing(list):
            def __iter__(self):
                grow()
                return super().__iter__()

        options = {
            "rate": {"lr": lambda step: 0.1 * grow()},
            "weight": {"kl_weight": grow},
            "data": {},
        }[place]
        data = Growing([regression_data(20)]) if place == "data" else regression_data(20)
        history = ps.fit(
            model, guide, data, num_steps=40, compiled=compiled, progress=False, **options
        )
        return vars(history), snapshot(guide)

    assert_same_bits(change(False), change("auto"))


def test_replays_of_a_fit_ask_for_no_state_where_no_other_code_runs(monkeypatch, traced_fit):
    asked, state = [], Modules.state
    monkeypatch.setattr(
        Modules, "state", lambda self, *args: asked.append(self) or state(self, *args)
    )
    model = make_linear_regressor(20)
    guide = ps.KTiedGuide(model)
    ps.fit(model, guide, regression_data(20), num_steps=30, progress=False)
    assert 0 < len(asked) < 10


class Averaging(nn.Linear):
    """Subtracts a running mean that is no buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.average = [torch.zeros(2)]

    def forward(self, x):
        out = super().forward(x)
        self.average[0][1].mul_(0.9).add_(0.1 * out.detach().mean())
        return out - self.average[0][1]


@pytest.mark.parametrize("is_refused", [False, True])
def test_tensors_that_are_no_buffers_are_changed_once_in_a_step(is_refused, traced_fit):
    class Layer(Averaging):
        def forward(self, x):
            out = super().forward(x)
            return out * (1 if is_refused and out.sum() > 0 else 2)

    results = []
    for compiled in (False, "traced"):
        pyro.set_rng_seed(0)
        layer = ps.bayesianize(Layer(3, 1), prior=1.0)
        model, data = ps.Regressor(layer, 12, noise_scale=0.3), regression_data()
        guide = ps.MeanFieldGuide(model)
        history = ps.fit(model, guide, data, num_steps=8, compiled=compiled, progress=False)
        results.append((history.elbo, layer.average[0]))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert ways(history) == ["eager"] * is_refused


def buffer_without_writes(kind):
    """Return zeros in one place, or of inference mode: no operation may write into them."""
    if kind == "expanded":
        return torch.zeros(1).expand(3)
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize("kind", ["expanded", "inference"])
def test_buffers_that_nothing_can_write_into_are_traced(kind, traced_fit):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - self.center)

    layer = Centred(3, 1)
    layer.register_buffer("center", buffer_without_writes(kind))
    model, data = ps.Regressor(ps.bayesianize(layer, prior=1.0), 12, 0.3), regression_data()
    history = ps.fit(model, ps.KTiedGuide(model), data, num_steps=8, progress=False)
    assert not history.compilation
