"""Validation and callbacks of fit: what is measured and when, what stops it, and what it changes."""

import math
import random

import numpy as np
import pyro
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay, TensorBoard
from pyro_structvi.infer.validation import NUM_DRAWS
from tests.infer.two_ranks import assert_equal, on_two_ranks
from tests.models import make_classifier, make_regressor, regression_data


def make(size=24, guide=ps.MeanFieldGuide, model=None):
    pyro.set_rng_seed(0)
    model = make_regressor(size) if model is None else model()
    return model, guide(model), regression_data(size)


def held_out(size=9):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(-1, keepdim=True)


def snapshot(*modules):
    return {
        f"{number}.{name}": value.clone()
        for number, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }


def numbers():
    return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002


class Recorder:
    """A metric that returns given values and writes down the parameters at each call."""

    def __init__(self, values, *modules):
        self.values, self.modules, self.states = iter(values), modules, []

    def __call__(self, prediction, y):
        self.states.append(snapshot(*self.modules))
        numbers()  # a metric may draw
        return next(self.values)


# ---- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_default_is_the_mean_log_predictive_density(batch_size):
    model, guide, data = make()
    options = {"num_steps": 3, "batch_size": batch_size, "progress": False}
    history = ps.fit(model, guide, data, validation=held_out(), **options)
    assert history.validation_steps == [0, 3]
    x, y = held_out()
    torch.default_generator.manual_seed(0)  # as the validation does
    expected = ps.predict(model, guide, x, NUM_DRAWS, y=y).log_density.mean().item()
    assert history.validation[-1] == pytest.approx(expected, rel=1e-9)


def test_it_is_the_density_by_hand():
    """Of a point and Gaussian noise: the normal log density at the residuals."""
    model, guide, data = make(guide=ps.MAPGuide)
    history = ps.fit(model, guide, data, num_steps=2, validation=held_out(), progress=False)
    x, y = held_out()
    with torch.no_grad():
        mean = ps.predict(model, guide, x, 1).functions[0]
    expected = torch.distributions.Normal(mean, 0.3).log_prob(y).sum(-1).mean().item()
    assert history.validation[-1] == pytest.approx(expected, rel=1e-9)


def test_a_metric_of_the_users_own():
    model, guide, (x, _) = make(12, model=make_classifier)
    y = torch.randint(4, (12,))
    accuracy = lambda prediction, y: (prediction.mean.argmax(-1) == y).double().mean()  # noqa: E731
    options = {"validation": (x, y), "metric": accuracy, "progress": False}
    history = ps.fit(model, guide, (x, y), num_steps=101, lr=0.1, **options)
    assert history.validation_steps == [0, 100, 101]
    assert all(0 <= value <= 1 for value in history.validation)
    assert history.validation[-1] > history.validation[0]


def test_each_member_of_an_ensemble_is_measured_once():
    seen = []
    metric = lambda prediction, y: seen.append(prediction.num_samples) or 0.0  # noqa: E731
    model, guide, data = make(guide=lambda model: ps.EnsembleGuide(model, 3))
    ps.fit(model, guide, data, num_steps=1, validation=held_out(), metric=metric, progress=False)
    assert seen == [3, 3]


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(x)

    class Sum(ps.Regressor):
        def forward(self, x, z, y=None):
            return super().forward(x + z, y)

    model = Sum(ps.bayesianize(Two(), prior=1.0), 24, 0.3)
    guide, (x, y) = ps.MAPGuide(model), regression_data(24)
    a, b = held_out()
    history = ps.fit(model, guide, (x, x, y), num_steps=2, validation=((a, a), b), progress=False)
    assert len(history.validation) == 2


# ---- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"num_steps": 101}, [0, 100, 101]),
        ({"num_steps": 5, "validate_every": 2}, [0, 2, 4, 5]),
        ({"num_steps": 4, "validate_every": 2}, [0, 2, 4]),
        ({"num_steps": 1, "validate_every": 50}, [0, 1]),
        ({"num_epochs": 1, "batch_size": 1, "size": 110}, [0, 110]),
    ],
)
def test_how_often(options, steps):
    model, guide, data = make(options.pop("size", 24))
    metric = lambda prediction, y: 0.0  # noqa: E731
    history = ps.fit(
        model,
        guide,
        data,
        validation=held_out(1),
        metric=metric,
        progress=False,
        compiled=False,
        **options,
    )
    assert history.validation_steps == steps
    assert len(history.validation) == len(steps)


# ---- what it changes -----------------------------------------------------------------------------


def noisy_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=False), 24, 0.3)


def test_it_changes_neither_the_training_nor_its_random_numbers_nor_modes():
    found = []
    for options in ({}, {"validation": held_out(), "validate_every": 1}):
        pyro.set_rng_seed(0)
        model, guide, data = make(model=noisy_model)
        guide.eval()
        model.net[1].eval()
        if options:
            options["metric"] = Recorder([0.0] * 20, model)
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
        found.append((history.elbo, snapshot(model, guide), modes, numbers(), own))
    (elbo, state, *others), (with_elbo, with_state, *with_others) = found
    assert elbo == with_elbo
    assert_equal(state, with_state)
    assert others == with_others


def test_validation_data_are_run_in_mini_batches():
    model, guide, data = make()
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args: None if module.training else sizes.append(len(args[0]))
    )
    options = {"validation": held_out(), "batch_size": 5, "progress": False}
    ps.fit(model, guide, data, num_steps=1, **options)
    assert {*sizes} == {5, 4}


def test_model_and_guide_are_evaluated_in_evaluation_mode():
    model, guide, data = make(model=noisy_model)
    options = {"validation": held_out(), "metric": lambda prediction, y: float(guide.training)}
    history = ps.fit(model, guide, data, num_steps=2, progress=False, **options)
    assert history.validation == [0.0, 0.0]
    assert guide.training


# ---- patience ------------------------------------------------------------------------------------


def fit_with(values, steps=20, model=None, **options):
    model, guide, data = make(model=model)
    metric = Recorder(values, model, guide)
    options = {"validate_every": 2, "patience": 3, "progress": False, "lr": 0.05} | options
    history = ps.fit(
        model, guide, data, num_steps=steps, validation=held_out(), metric=metric, **options
    )
    return history, metric, snapshot(model, guide)


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


def test_a_fit_that_comes_to_its_end_goes_back_to_the_best_too():
    history, metric, state = fit_with([1, 5, 2, 2], steps=6)
    assert len(history.elbo) == 6
    assert_equal(state, metric.states[1])


def test_without_patience_the_last_parameters_stay():
    history, metric, state = fit_with([1, 5, 2, 2], steps=6, patience=None)
    assert len(history.elbo) == 6
    assert_equal(state, metric.states[3])


def test_a_value_of_minus_infinity_is_the_worst():
    _, metric, state = fit_with([-math.inf, 1, -math.inf, -math.inf], steps=6)
    assert_equal(state, metric.states[1])


def test_an_interrupted_fit_goes_back_to_the_best(monkeypatch):
    model, guide, data = make()
    metric = Recorder([1, 5, 2], model, guide)

    def interrupt(history):
        if len(history.elbo) == 5:
            raise KeyboardInterrupt

    options = {"validation": held_out(), "metric": metric, "validate_every": 2, "patience": 9}
    history = ps.fit(
        model, guide, data, num_steps=20, callbacks=[interrupt], progress=False, **options
    )
    assert history.interrupted
    assert_equal(snapshot(model, guide), metric.states[1])


# ---- with checkpoints ----------------------------------------------------------------------------


def fit_in_part(values, path, stop, patience=3, seed=0, **options):
    model, guide, data = make(model=noisy_model)
    pyro.set_rng_seed(seed)
    lr_schedule = lambda step: 1 / 0 if step == stop else CosineDecay(30)(step)  # noqa: E731
    options = {"patience": patience, "validate_every": 2, "lr": 0.05} | options
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
    options |= {"lr": 0.05, "lr_schedule": CosineDecay(30), "progress": False}
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
