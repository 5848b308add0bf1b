"""Validation of fit: what is measured and when, what stops it, and what it changes."""

import math
import random

import numpy as np
import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay
from pyro_structvi.infer.validation import NUM_DRAWS
from tests.infer.test_checked_steps import states
from tests.models import make_linear_regressor, make_regressor, regression_data


def make(size=24, guide=ps.MeanFieldGuide, model=None):
    pyro.set_rng_seed(0)
    model = make_regressor(size) if model is None else model()
    return model, guide(model), regression_data(size)


def held_out(size=9):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(-1, keepdim=True)


def numbers():
    return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Recorder:
    """A metric that returns given values and writes down the parameters at each call."""

    def __init__(self, values, *modules):
        self.values, self.modules, self.states = iter(values), modules, []

    def __call__(self, prediction, y):
        self.states.append(states(*self.modules))
        numbers()  # a metric may draw
        return next(self.values)


def noisy_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=False), 24, 0.3)


# ---- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_default_is_the_mean_log_predictive_density(batch_size):
    model, guide, data = make()
    options = {"num_steps": 3, "batch_size": batch_size, "progress": False}
    history = ps.fit(model, guide, data, validation=ps.Validation(held_out()), **options)
    assert history.validation_steps == [0, 3]
    x, y = held_out()
    torch.default_generator.manual_seed(0)  # as the validation does
    expected = ps.predict(model, guide, x, num_samples=NUM_DRAWS, y=y).log_density.mean().item()
    assert history.validation[-1] == pytest.approx(expected, rel=1e-9)


def test_each_member_of_an_ensemble_is_measured_once():
    seen = []
    metric = lambda prediction, y: seen.append(prediction.num_samples) or 0.0  # noqa: E731
    model, guide, data = make(guide=lambda model: ps.EnsembleGuide(model, 3))
    measured = ps.Validation(held_out(), metric)
    ps.fit(model, guide, data, num_steps=1, validation=measured, progress=False)
    assert seen == [3, 3]


def test_several_inputs():
    class Sum(ps.Regressor):
        def forward(self, x, z, y=None):
            return super().forward(x + z, y)

    model = Sum(ps.bayesianize(nn.Linear(3, 1), prior=1.0), 24, 0.3)
    guide, (x, y) = ps.MAPGuide(model), regression_data(24)
    a, b = held_out()
    options = {"validation": ps.Validation(((a, a), b)), "progress": False}
    history = ps.fit(model, guide, (x, x, y), num_steps=2, **options)
    assert len(history.validation) == 2


# ---- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "every", "steps"),
    [
        ({"num_steps": 101}, None, [0, 100, 101]),
        ({"num_steps": 5}, 2, [0, 2, 4, 5]),
        ({"num_steps": 4}, 2, [0, 2, 4]),
        ({"num_steps": 1}, 50, [0, 1]),
        pytest.param({"num_epochs": 1, "batch_size": 1}, None, [0, 110], marks=pytest.mark.slow),
    ],
)
def test_how_often(options, every, steps):
    size = 110 if "num_epochs" in options else 24
    model, guide, data = make(size, model=lambda: make_linear_regressor(size))
    validation = ps.Validation(held_out(1), lambda prediction, y: torch.tensor(0.5), every)
    options |= {"progress": False, "compiled": False}
    history = ps.fit(model, guide, data, validation=validation, **options)
    assert history.validation_steps == steps
    assert history.validation == [0.5] * len(steps)


# ---- what it changes -----------------------------------------------------------------------------


def test_it_changes_neither_the_training_nor_its_random_numbers_nor_modes():
    found = []
    for measures in (False, True):
        pyro.set_rng_seed(0)
        model, guide, data = make(model=noisy_model)
        guide.eval()
        model.net[1].eval()
        metric = Recorder([0.0] * 20, model)
        options = {"validation": ps.Validation(held_out(), metric, every=1)} if measures else {}
        modes = []
        hook = guide.register_forward_pre_hook(
            lambda *_, modes=modes, model=model, guide=guide: modes.append([
                module.training for module in [*model.modules(), *guide.modules()]
            ])
        )
        pyro.set_rng_seed(1)
        history = ps.fit(model, guide, data, num_steps=7, batch_size=10, progress=False, **options)
        hook.remove()
        own = [module.training for module in [*model.modules(), *guide.modules()]]
        found.append((history.elbo, states(model, guide), modes, numbers(), own))
    (elbo, state, *others), (with_elbo, with_state, *with_others) = found
    assert elbo == with_elbo
    assert_equal(state, with_state)
    assert others == with_others


def test_validation_data_are_run_in_mini_batches_in_evaluation_mode():
    model, guide, data = make(model=noisy_model)
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args: None if module.training else sizes.append(len(args[0]))
    )
    validation = ps.Validation(held_out(), lambda prediction, y: float(guide.training))
    options = {"validation": validation, "batch_size": 5, "progress": False}
    history = ps.fit(model, guide, data, num_steps=2, **options)
    assert {*sizes} == {5, 4}
    assert history.validation == [0.0, 0.0]
    assert guide.training


# ---- patience ------------------------------------------------------------------------------------


def fit_with(values, steps=20, model=None, patience=3, **options):
    model, guide, data = make(model=model)
    metric = Recorder(values, model, guide)
    options = {"kl_weight": 1.0, "progress": False, "lr": 0.05} | options
    options["validation"] = ps.Validation(held_out(), metric, 2, patience)
    history = ps.fit(model, guide, data, num_steps=steps, **options)
    return history, metric, states(model, guide)


def test_it_stops_where_nothing_gets_better_and_goes_back_to_the_best():
    values = [0.0, 1.0, 3.0, 2.0, 3.0, 2.5, 9.0]
    history, metric, state = fit_with(values, model=noisy_model)
    assert history.validation == values[:6]
    assert history.validation_steps == [0, 2, 4, 6, 8, 10]
    assert len(history.elbo) == 10
    assert_equal(state, metric.states[2])
    assert not torch.equal(state["0.net.1.running_mean"], metric.states[3]["0.net.1.running_mean"])


def test_patience_begins_anew_where_something_gets_better():
    history, metric, state = fit_with([1, 0, 0, 2, 1, 1, 3, 0, 0, 1, 1])
    assert history.validation_steps[-1] == 18
    assert_equal(state, metric.states[6])


@pytest.mark.parametrize(
    ("values", "patience", "kept"),
    [([1, 5, 2, 2], 3, 1), ([1, 5, 2, 2], None, 3), ([-math.inf, 1, -math.inf, -math.inf], 3, 1)],
)
def test_a_fit_that_comes_to_its_end_goes_back_to_the_best_under_patience(values, patience, kept):
    history, metric, state = fit_with(values, steps=6, patience=patience)
    assert len(history.elbo) == 6
    assert_equal(state, metric.states[kept])


@pytest.mark.parametrize("kl_weight", ["annealed", ps.LinearAnnealing(10)])
def test_no_value_counts_while_the_weight_of_the_kl_rises(kl_weight):
    values = [9, 8, 7, 6, 5, 1, 3, 2, 2, 2]
    history, metric, state = fit_with(values, kl_weight=kl_weight)
    assert history.validation == values
    assert_equal(state, metric.states[6])


@pytest.mark.parametrize("make_points", [ps.MAPGuide, lambda model: ps.EnsembleGuide(model, 2)])
def test_every_value_of_points_counts(make_points):
    model, guide, data = make(guide=make_points)
    metric = Recorder([5, 9, 8, 7], model, guide)
    measured = ps.Validation(held_out(), metric, every=2, patience=2)
    history = ps.fit(model, guide, data, num_steps=20, validation=measured, progress=False)
    assert history.validation == [5, 9, 8, 7]
    assert_equal(states(model, guide), metric.states[1])


def test_an_interrupted_fit_goes_back_to_the_best(monkeypatch):
    model, guide, data = make()
    metric = Recorder([1, 5, 2], model, guide)

    def interrupt(step):
        if step == 5:
            raise KeyboardInterrupt
        return 0.05

    options = {"validation": ps.Validation(held_out(), metric, 2, 9), "kl_weight": 1.0}
    history = ps.fit(model, guide, data, num_steps=20, lr=interrupt, progress=False, **options)
    assert history.interrupted
    assert_equal(states(model, guide), metric.states[1])


# ---- with checkpoints ----------------------------------------------------------------------------


def fit_in_part(values, path, stop, patience=3, seed=0, **options):
    model, guide, data = make(model=noisy_model)
    pyro.set_rng_seed(seed)
    lr = lambda step: 1 / 0 if step == stop else CosineDecay(30, 0.05)(step)  # noqa: E731
    validation = ps.Validation(held_out(), Recorder(values, model, guide), 2, patience)
    options = {"kl_weight": 1.0, "num_steps": 20, "validation": validation} | options
    if path is not None:
        options["checkpoint"] = ps.Checkpoint(path, every=1, resume=True)
    try:
        history = ps.fit(model, guide, data, batch_size=10, lr=lr, progress=False, **options)
    except ZeroDivisionError:
        return None
    return history, states(model, guide), numbers()


VALUES = [0.0, 1.0, 3.0, 2.0, 1.0, 2.5, 9.0, 8.0, 8.0, 8.0, 7.0]


@pytest.mark.parametrize(
    "stop", [4, 9, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 5))]
)
def test_a_run_that_goes_on_knows_the_best(stop, tmp_path):
    expected, state, drawn = fit_in_part(VALUES, None, None)
    assert fit_in_part(VALUES, tmp_path / "run.pt", stop) is None
    left = VALUES[stop // 2 + 1 :]
    found, found_state, found_drawn = fit_in_part(left, tmp_path / "run.pt", None, seed=4)
    assert vars(found) == vars(expected)
    assert_equal(found_state, state)
    assert found_drawn == drawn


def test_a_run_that_goes_on_forgets_the_measurement_at_its_former_end(tmp_path):
    """The whole run does not measure after 7 steps, where the metric is highest here."""
    values = [0.0, 1.0, 3.0, 2.0, 1.0, 2.5, 2.0]
    expected, state, _ = fit_in_part(values, None, None, num_steps=12)
    part, _, _ = fit_in_part([0.0, 1.0, 3.0, 2.0, 9.0], tmp_path / "run.pt", None, num_steps=7)
    assert part.validation_steps == [0, 2, 4, 6, 7]
    found, found_state, _ = fit_in_part(values[4:], tmp_path / "run.pt", None, num_steps=12)
    assert vars(found) == vars(expected)
    assert_equal(found_state, state)


@pytest.mark.slow
def test_a_run_that_has_stopped_stays_so_and_goes_on_with_more_patience(tmp_path):
    path = tmp_path / "run.pt"
    expected, state, _ = fit_in_part(VALUES, path, None)
    again, same, _ = fit_in_part([], path, None, seed=3)
    assert vars(again) == vars(expected)
    assert_equal(same, state)
    more, _, _ = fit_in_part(VALUES[6:], path, None, patience=4, seed=3)
    whole, _, _ = fit_in_part(VALUES, None, None, patience=4)
    assert vars(more) == vars(whole)


def test_patience_that_is_asked_for_later_begins_then(tmp_path):
    path = tmp_path / "run.pt"
    assert fit_in_part(VALUES, path, 5, patience=None) is None
    history, _, _ = fit_in_part([2.0, 1.0, 1.0, 1.0], path, None)
    assert history.validation == [0.0, 1.0, 3.0, 2.0, 1.0, 1.0, 1.0]


def test_another_metric_or_other_data_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit_in_part(VALUES, path, None)
    model, guide, data = make(model=noisy_model)
    options = {"checkpoint": ps.Checkpoint(path, resume=True), "batch_size": 10, "num_steps": 20}
    options |= {"lr": CosineDecay(30, 0.05), "progress": False, "kl_weight": 1.0}
    for own, message in (
        ([held_out()], "`metric` of `validation` is 'mean_log_density' here, and 'Recorder' in"),
        (
            [held_out(8), Recorder([], guide)],
            "the number of examples in `validation` is 8 here, and 9 in",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ps.fit(model, guide, data, validation=ps.Validation(*own), **options)


# ---- bad input -----------------------------------------------------------------------------------


def test_wrong_data_are_named():
    (x, y), (_, short) = held_out(), held_out(8)
    for data, error, message in (
        (x, ValueError, r"`data` must be a tuple `\(x, y\)` of inputs"),
        ((x, short), ValueError, r"must have one length for validation, but got \[9, 8\]"),
        ((x * math.nan, y), ValueError, "`data` holds 27 NaN"),
    ):
        with pytest.raises(error, match=message):
            ps.Validation(data)


def test_a_metric_that_is_no_number():
    model, guide, data = make()
    before = states(guide)
    for value, error, message in (
        ("good", TypeError, r"`metric\(prediction, y\)` must return a number"),
        (math.nan, ValueError, "returned NaN"),
    ):
        measured = ps.Validation(held_out(), lambda prediction, y, value=value: value)
        with pytest.raises(error, match=message):
            ps.fit(model, guide, data, num_steps=3, validation=measured, progress=False)
    assert_equal(states(guide), before)
