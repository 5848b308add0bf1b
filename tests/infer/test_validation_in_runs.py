"""Validation beside checkpoints, callbacks and other processes, and what is refused."""

import math

import numpy as np
import pyro
import pytest
import torch
import torch.distributed as dist

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay, TensorBoard
from tests.infer.two_ranks import assert_equal, on_two_ranks
from tests.infer.validated_fits import Recorder, held_out, make, noisy_model, numbers, snapshot

# ---- with checkpoints ----------------------------------------------------------------------------


def fit_in_part(values, path, stop, patience=3, seed=0, **options):
    model, guide, data = make(model=noisy_model)
    pyro.set_rng_seed(seed)
    lr_schedule = lambda step: 1 / 0 if step == stop else CosineDecay(30)(step)  # noqa: E731
    options = {"patience": patience, "validate_every": 2, "lr": 0.05, "kl_weight": 1.0} | options
    metric = Recorder(values, model, guide)
    options |= {"validation": held_out(), "metric": metric, "batch_size": 10}
    if path is not None:
        options |= {"checkpoint": path, "every": 1, "resume": True}
    try:
        history = ps.fit(
            model, guide, data, num_steps=20, lr_schedule=lr_schedule, progress=False, **options
        )
    except ZeroDivisionError:
        return None
    return history, snapshot(model, guide), numbers()


VALUES = [0.0, 1.0, 3.0, 2.0, 1.0, 2.5, 9.0, 8.0, 8.0, 8.0, 7.0]


@pytest.mark.parametrize("stop", [1, 4, 5, 8, 9])
def test_a_run_that_goes_on_knows_the_best(stop, tmp_path):
    expected, state, drawn = fit_in_part(VALUES, None, None)
    assert fit_in_part(VALUES, tmp_path / "run.pt", stop) is None
    left = VALUES[stop // 2 + 1 :]
    found, found_state, found_drawn = fit_in_part(left, tmp_path / "run.pt", None, seed=4)
    assert vars(found) == vars(expected)
    assert_equal(found_state, state)
    assert found_drawn == drawn


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


def test_the_best_is_in_the_file(tmp_path):
    _, state, _ = fit_in_part(VALUES, tmp_path / "run.pt", None)
    best = torch.load(tmp_path / "run.pt")["validation"]["best"]
    found = {f"1.{name}": value for name, value in best["guide"].items()}
    assert_equal(found, {name: value for name, value in state.items() if name[0] == "1"})


def test_another_metric_or_other_data_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit_in_part(VALUES, path, None)
    model, guide, data = make(model=noisy_model)
    options = {"checkpoint": path, "resume": True, "patience": 2, "batch_size": 10, "num_steps": 20}
    options |= {"lr": 0.05, "lr_schedule": CosineDecay(30), "progress": False, "kl_weight": 1.0}
    message = "`metric` is 'mean_log_density' here, and 'Recorder' in"
    with pytest.raises(ValueError, match=message):
        ps.fit(model, guide, data, validation=held_out(), **options)
    metric = Recorder([], guide)
    message = "the number of examples in `validation` is 8 here, and 9 in"
    with pytest.raises(ValueError, match=message):
        ps.fit(model, guide, data, validation=held_out(8), metric=metric, **options)


# ---- callbacks -----------------------------------------------------------------------------------


def test_callbacks_see_the_history_after_each_step_and_stop():
    model, guide, data = make()
    seen, closed = [], []

    class Watching:
        def __call__(self, history):
            seen.append((len(history.elbo), history.elbo[-1], len(history.validation)))

        def close(self):
            closed.append(len(seen))

    stop = lambda history: len(history.elbo) == 4  # noqa: E731
    options = {"validation": held_out(), "validate_every": 2, "progress": False}
    callbacks = [stop, Watching()]
    history = ps.fit(model, guide, data, num_steps=9, callbacks=callbacks, **options)
    assert seen == [*zip([1, 2, 3, 4], history.elbo, [1, 2, 2, 3], strict=True)]
    assert closed == [4]


@pytest.mark.parametrize("stops", [True, np.bool_(True), torch.tensor(True)])
def test_truth_values_of_every_kind_stop(stops):
    model, guide, data = make()
    history = ps.fit(model, guide, data, num_steps=9, callbacks=[lambda _: stops], progress=False)
    assert len(history.elbo) == 1


def test_an_error_of_a_callback_closes_all():
    model, guide, data = make()
    closed = []

    class Closing:
        def __call__(self, history):
            raise OSError("no more")

        def close(self):
            closed.append(True)

    with pytest.raises(OSError, match="no more"):
        ps.fit(model, guide, data, num_steps=9, callbacks=[Closing()], progress=False)
    assert closed


def test_a_stop_by_a_callback_is_kept(tmp_path):
    model, guide, data = make()
    path = tmp_path / "run.pt"
    stop = lambda history: len(history.elbo) == 4  # noqa: E731
    ps.fit(model, guide, data, num_steps=9, callbacks=[stop], progress=False, checkpoint=path)
    assert torch.load(path)["steps"] == 4


# ---- several processes ---------------------------------------------------------------------------


def fit_on_ranks():
    model, guide, data = make(model=noisy_model)
    pyro.set_rng_seed(dist.get_rank())
    values = [1.0, 3.0, 2.0, 1.0, 0.0] if dist.get_rank() == 0 else [9.0, 8.0, 7.0, 6.0, 5.0]
    called = []
    stop = lambda history: called.append(1) or len(history.elbo) == 9 - dist.get_rank()  # noqa: E731
    options = {"validation": held_out(), "metric": Recorder(values, guide), "patience": 3}
    options["kl_weight"] = 1.0
    options |= {"validate_every": 2, "batch_size": 4, "progress": False, "callbacks": [stop]}
    history = ps.fit(model, guide, data, num_steps=20, **options)
    calls = len(called)
    patient = len(history.elbo), history.validation
    model, guide, data = make(model=noisy_model)
    history = ps.fit(model, guide, data, num_steps=20, callbacks=[stop], progress=False)
    return patient, snapshot(model, guide), calls, len(history.elbo)


def test_all_ranks_stop_alike_by_what_rank_0_measures(tmp_path):
    (first, state, calls, stopped), (second, other, others_calls, others) = on_two_ranks(
        fit_on_ranks, tmp_path
    )
    assert first == second == (8, [1.0, 3.0, 2.0, 1.0, 0.0])
    assert_equal(state, other)
    assert calls == 8
    assert others_calls == 0
    assert stopped == others == 9


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patience": 3}, ValueError, "`patience` needs `validation`"),
        ({"metric": max}, ValueError, "`metric` needs `validation`"),
        ({"validate_every": 3}, ValueError, "`validate_every` needs `validation`"),
        (
            {"validation": held_out()[0]},
            ValueError,
            r"`validation` must be a tuple `\(x, y\)` of inputs",
        ),
        (
            {"validation": (held_out()[0], held_out(8)[1])},
            ValueError,
            r"`validation` must have one length, but got \[9, 8\]",
        ),
        (
            {"validation": (held_out()[0] * math.nan, held_out()[1])},
            ValueError,
            "`validation` holds 27 NaN",
        ),
        (
            {"validation": held_out(), "metric": lambda prediction, y: "good"},
            TypeError,
            r"`metric\(prediction, y\)` must return a number",
        ),
        (
            {"validation": held_out(), "metric": lambda prediction, y: math.nan},
            ValueError,
            "returned NaN",
        ),
        (
            {"callbacks": [lambda history: history.elbo[-1]]},
            TypeError,
            r"`callbacks\[0\]\(history\)` must return None, or True to stop",
        ),
        ({"callbacks": [TensorBoard]}, TypeError, "`callbacks` must be a list of functions"),
        ({"callbacks": print}, TypeError, "`callbacks` must be a list of functions"),
    ],
)
def test_what_is_wrong_is_named(options, error, message):
    model, guide, data = make()
    before = snapshot(guide)
    with pytest.raises(error, match=message):
        ps.fit(model, guide, data, num_steps=3, progress=False, **options)
    if "callbacks" not in options:
        assert_equal(snapshot(guide), before)
