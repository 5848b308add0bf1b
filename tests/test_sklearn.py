"""Estimators of scikit-learn."""

import pickle
from functools import partial
from unittest.mock import Mock, patch

import numpy as np
import pandas as pd
import pytest
import torch
from joblib import parallel_backend
from pyro.distributions.torch import Independent
from pyro.infer.autoguide import AutoNormal
from scipy.stats import norm, t
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator

import pyro_structvi as ps
from pyro_structvi.distributions import IsotropicStudentT
from pyro_structvi.sites.finding import find_declared_sites
from pyro_structvi.sklearn import (
    BayesianMLPClassifier,
    BayesianMLPRegressor,
    RepeatedTargetsWarning,
    base,
)
from pyro_structvi.weights.torch_distributions import base_of

SMALL = {"num_members": 2, "num_steps": 10, "random_state": 0, "dtype": "float64"}
POINT = {**SMALL, "posterior": "map", "refine": False, "validation_fraction": 0.0}
CHAINS = {**SMALL, "refine": True, "num_sampling_steps": 20}


@pytest.fixture
def table():
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(60, 3)) * [1.0, 100.0, 0.01] + [0.0, 5000.0, 0.0]
    targets = 2000 + 300 * inputs[:, 0] + 30 * generator.normal(size=60)
    return inputs, targets


@pytest.mark.slow
@pytest.mark.parametrize("make", [BayesianMLPRegressor, BayesianMLPClassifier])
def test_checks_of_scikit_learn(make):
    estimator = make((8,), **POINT)
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    wrong = {each["check_name"]: each["exception"] for each in results if each["exception"]}
    assert set(wrong) <= {"check_array_api_input"}  # skipped without SCIPY_ARRAY_API


@pytest.mark.parametrize(
    ("options", "shift"),
    [
        pytest.param(POINT, 70.0, id="map"),
        pytest.param(SMALL | {"refine": False}, 70.0, id="ensemble"),
        pytest.param(CHAINS, 0.0, id="chains", marks=pytest.mark.slow),  # a shift rounds
    ],
)
def test_predictions_are_equivariant_to_units(table, options, shift):
    """Of inputs and of targets: training sees standardized data."""
    inputs, targets = table
    found = []
    for scale, offset in ((1.0, 0.0), (4.0, shift)):
        estimator = BayesianMLPRegressor((6,), **options)
        estimator.fit(scale * inputs + offset, scale * targets + offset)
        median, std = estimator.predict(scale * inputs[:5] + offset, return_std=True)
        interval = estimator.predict_interval(scale * inputs[:5] + offset, 0.8)
        middle = estimator.predict_interval(scale * inputs[:5] + offset, 1e-6).mean(1)
        np.testing.assert_allclose(median, middle, atol=1e-5 * scale)
        found.append(np.column_stack([median - offset, interval - offset, std]) / scale)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    median, lower, upper, std = found[0].T
    assert ((lower < median) & (median < upper) & (std > 0)).all()


@pytest.mark.parametrize("df", [None, 5.0, "learned"])
def test_a_points_predictive_distribution_is_that_of_the_noise(table, df):
    inputs, targets = table
    estimator = BayesianMLPRegressor((6,), **POINT, noise_df=df).fit(inputs, targets)
    mean, std = estimator.predict(inputs, return_std=True)
    interval = estimator.predict_interval(inputs, 0.9)
    df = 1 + estimator.draws_["df_minus_one"].item() if df == "learned" else df
    noise = norm(mean, std) if df is None else t(df, mean, std * np.sqrt(1 - 2 / df))
    np.testing.assert_allclose(interval[:, 1], noise.ppf(0.95), rtol=1e-6)
    expected = noise.logpdf(targets)
    np.testing.assert_allclose(estimator.log_density(inputs, targets), expected, rtol=1e-8)
    draws = estimator.sample_y(inputs[:3], n_samples=4000, random_state=1)
    assert draws.shape == (3, 4000)
    z = (draws - mean[:3, None]) / std[:3, None]
    assert np.abs(z.mean(1)).max() < 5 / np.sqrt(4000)
    assert np.abs(z.var(1) - 1).max() < 5 * np.sqrt((2 if df is None else 8) / 4000)  # kurtosis


def test_the_noise_of_rounded_targets_has_the_floor_of_rounding(table):
    """The density of repeated targets has no bound else, and the noise of some rows vanishes."""
    inputs, targets = table
    ratings = 10.0 * np.digitize(targets, np.quantile(targets, np.linspace(0.1, 0.9, 7)))
    estimator = BayesianMLPRegressor((6,), **POINT | {"num_steps": 2}, noise_df=None)
    floor = 10 / np.sqrt(12)
    for unit in (1.0, 1e-3):
        estimator.fit(inputs, unit * ratings + 5.0)
        np.testing.assert_allclose(estimator.noise_floor_, floor * unit)
        assert estimator.predict(inputs, return_std=True)[1].min() > floor * unit
    estimator.set_params(noise_floor=100.0).fit(inputs, ratings)
    assert estimator.predict(inputs, return_std=True)[1].min() > 100.0
    estimator.set_params(noise_floor=0.0).fit(inputs, ratings)
    assert estimator.model_.noise_floor == 1e-6
    estimator.set_params(noise_floor="auto")
    for continuous in (targets, np.full(60, 3.0), np.repeat(targets[:20], 3)):
        assert estimator.fit(inputs, continuous).noise_floor_ == 0.0
    repeated = np.arange(20).repeat(3)  # two and a half examples for each rating
    assert estimator.fit(inputs[repeated], ratings[repeated]).noise_floor_ == 0.0
    some = np.where(np.arange(60) % 5, targets, 2.5)  # a fifth
    with pytest.warns(
        RepeatedTargetsWarning, match=r"20% of the targets are 2\.5\. .* `noise_floor`"
    ):
        estimator.fit(inputs, some)
    estimator.fit(inputs[repeated], some[repeated])  # twelve of four distinct examples
    some[0] = 2.6
    estimator.fit(inputs, some)
    estimator.set_params(noise_floor=0.1).fit(inputs, np.where(np.arange(60) % 2, targets, 2.5))


def test_targets_that_differ_by_the_rounding_of_arithmetic_have_one_value(table):
    """As 0.1 + 0.2 and 0.3; the least spacing of the values was a unit of the last digit."""
    inputs, targets = table
    tenths = np.digitize(targets, np.quantile(targets, np.linspace(0.1, 0.9, 7)))
    estimator = BayesianMLPRegressor((6,), **POINT | {"num_steps": 1})
    first = np.where(np.arange(60) % 2, 3, -1)
    computed = first / 10 + (tenths - first) / 10
    assert len(np.unique(computed)) > len(np.unique(tenths))
    for ratings in (tenths / 10, computed, computed + 1e6):
        floor = estimator.fit(inputs, ratings).noise_floor_
        np.testing.assert_allclose(floor, 0.1 / np.sqrt(12), rtol=1e-8)
    single = first.astype(np.float32) / 10 + (tenths - first).astype(np.float32) / 10
    np.testing.assert_allclose(estimator.fit(inputs, single).noise_floor_, floor, rtol=1e-5)
    wide = np.array([-100, 0, 100], dtype=np.int8)[np.arange(60) % 3]  # whose differences overflow
    assert estimator.fit(inputs, wide).noise_floor_ == 100 / np.sqrt(12)
    some = np.where(np.arange(60) % 5, targets, [0.3, 0.1 + 0.2] * 30)
    with pytest.warns(RepeatedTargetsWarning, match=r"20% of the targets are 0\.3\."):
        estimator.fit(inputs, some)


def test_rows_are_predicted_some_at_a_time(table, monkeypatch):
    """Memory does not grow with their number; a sample is of one function at all rows."""
    inputs, targets = table
    estimator = BayesianMLPRegressor((4,), **SMALL, refine=False).fit(inputs, targets)

    def found():
        median, std = estimator.predict(inputs, return_std=True)
        interval = estimator.predict_interval(inputs)
        return np.column_stack([median, std, interval, estimator.log_density(inputs, targets)])

    at_once = found()
    monkeypatch.setattr(base, "FUNCTIONS_AT_A_TIME", 7)
    np.testing.assert_allclose(found(), at_once, rtol=1e-8)
    for draw, sign in enumerate((-1.0, 1.0)):
        for value in estimator.draws_.values():
            value[draw] = 0
        estimator.draws_["net.net.2.bias"][draw] = torch.tensor([9.0 * sign, -9.0])
    is_high = estimator.sample_y(inputs, n_samples=50) > targets.mean()
    assert (is_high == is_high[0]).all()
    assert 0 < is_high[0].mean() < 1


def test_a_sample_runs_the_draws_that_it_takes(table):
    """Draws of the posterior are taken without repeats, and then again with other noise."""
    inputs, targets = table
    estimator = BayesianMLPRegressor((4,), **SMALL, refine=False).fit(inputs, targets)
    # Five constant functions, whose noise is far smaller than their distances.
    draws = {name: each.new_zeros(5, *each.shape[1:]) for name, each in estimator.draws_.items()}
    draws["net.net.2.bias"][:, 0], draws["net.net.2.bias"][:, 1] = torch.arange(5), -30
    estimator.draws_ = draws
    center, scale = estimator.y_scaler_.mean_[0], estimator.y_scaler_.scale_[0]
    for count in (1, 3, 5, 12):
        with patch.object(base, "predict", wraps=base.predict) as run:
            samples = estimator.sample_y(inputs, count, random_state=count)
        assert {len(each) for each in run.call_args.args[1].values()} == {min(count, 5)}
        np.testing.assert_array_equal(samples, estimator.sample_y(inputs, count, count))
        numbers = np.rint((samples - center) / scale)
        assert (numbers == numbers[0]).all()
        assert len(np.unique(samples)) == samples.size
        uses = np.unique(numbers[0], return_counts=True)[1]
        assert len(uses) == min(count, 5)
        assert uses.max() == -(-count // 5)
    first = [np.rint((estimator.sample_y(inputs[:1], 1, k) - center) / scale) for k in range(50)]
    assert len(np.unique(first)) == 5  # false alarms: 5 * 0.8 ** 50 = 7e-5


def test_it_is_an_estimator_as_others(table):
    inputs, targets = table
    estimator = BayesianMLPRegressor(4, **POINT)  # one hidden layer, as in `MLPRegressor`
    search = GridSearchCV(
        make_pipeline(MinMaxScaler(), estimator),
        {"bayesianmlpregressor__prior_scale": [0.5, 1.0]},
        cv=2,
    ).fit(inputs, targets)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert np.isfinite(cross_val_score(clone(estimator), inputs, targets, cv=2)).all()
    frame = pd.DataFrame(inputs, columns=["a", "b", "c"])
    fitted = estimator.fit(frame, targets)
    assert [*fitted.feature_names_in_] == ["a", "b", "c"]
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(frame), fitted.predict(frame))
    again.set_params(dtype="float32", device="meta")  # of the next fit
    np.testing.assert_array_equal(again.predict(frame), fitted.predict(frame))
    densities = again.log_density(frame, targets)
    np.testing.assert_array_equal(densities, fitted.log_density(frame, targets))
    random_state = torch.get_rng_state()
    clone(estimator).fit(inputs, targets)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_a_fit_depends_on_numbers_and_options_only(table, dtype):
    """Not on the layout of a table in memory, on torch's default dtype, or on disabled gradients."""
    inputs, targets = table

    def found(rows):
        estimator = BayesianMLPRegressor((4,), **CHAINS | {"dtype": dtype, "noise_df": 4.5})
        median, std = estimator.fit(rows, targets).predict(rows, return_std=True)
        # A second call draws nothing anew.
        np.testing.assert_array_equal(estimator.predict(rows), median)
        return estimator.guide_.state_dict(), np.column_stack([median, std])

    points, predictions = found(inputs)
    if dtype == "float64":  # whose rounding single precision would hide
        others = np.asfortranarray(inputs), pd.DataFrame(inputs).copy()
        for rows, block in zip(others, (torch.no_grad, torch.inference_mode), strict=True):
            with block():
                np.testing.assert_array_equal(found(rows)[1], predictions)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        others = found(inputs)[0]
    finally:
        torch.set_default_dtype(default)
    torch.testing.assert_close(others, points, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "targets"),
    [(BayesianMLPRegressor, [100.0, 300.0]), (BayesianMLPClassifier, ["b", "c"])],
)
def test_a_fit_that_fails_leaves_the_one_before(table, make, targets, monkeypatch):
    """A new scaling of targets, or new classes, with old draws would be another prediction.

    ``fit`` returns at an interrupt, and an estimator of some of its steps would look like one of all.
    """
    inputs, high = table[0], table[0][:, 0] > 0
    estimator = make((4,), activation="sin", **POINT)
    with pytest.raises(ValueError, match="`activation` must be"):
        estimator.fit(inputs, high)
    with pytest.raises(NotFittedError):
        estimator.predict(inputs)
    estimator.set_params(activation="tanh").fit(inputs, high)
    expected, attributes = estimator.predict(inputs), vars(estimator).copy()
    monkeypatch.setattr(base, "fit", Mock(return_value=Mock(interrupted=True)))
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(5 * inputs[:, :2], np.where(high, *targets))
    assert vars(estimator) == attributes
    np.testing.assert_array_equal(estimator.predict(inputs), expected)


def test_predictions_are_arrays_with_transformers_of_data_frames(table):
    """Scalings inside of an estimator followed ``transform_output``, and a fit was an error."""
    estimator = BayesianMLPRegressor((4,), **POINT)
    expected = estimator.fit(*table).predict(table[0])
    with config_context(transform_output="pandas"):
        found = estimator.fit(*table).predict(table[0])
        densities = estimator.log_density(*table)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(densities, estimator.log_density(*table))


def test_options_are_numbers_of_numpy_too(table):
    """As those that ``RandomizedSearchCV`` draws."""
    names = {"prior_scale": 2.0, "batch_size": 16, "noise_df": 4.0, "num_steps": 20}
    found = []
    for kinds in ({float: float, int: int}, {float: np.float32, int: np.int64}):
        options = {name: kinds[type(value)](value) for name, value in names.items()}
        estimator = BayesianMLPRegressor((4,), **POINT | options).fit(*table)
        found.append(estimator.predict(table[0]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("has_chains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fits_in_several_threads_are_those_of_one(table, has_chains):
    """Handlers of Pyro and the random stream of torch belong to the process."""
    estimator = BayesianMLPRegressor((4,), **CHAINS | {"refine": has_chains})
    expected = cross_val_predict(estimator, *table, cv=2)
    state = torch.get_rng_state()
    with parallel_backend("threading", n_jobs=2):
        found = cross_val_predict(estimator, *table, cv=2)
    np.testing.assert_array_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_log_probabilities_do_not_underflow():
    inputs, labels = load_iris(return_X_y=True)
    estimator = BayesianMLPClassifier((4,), **SMALL, refine=False).fit(inputs, labels)
    logs = estimator.predict_log_proba(inputs)
    np.testing.assert_allclose(np.exp(logs), estimator.predict_proba(inputs), rtol=1e-12)
    far = estimator.predict_log_proba(1e6 * inputs[:5])
    assert np.isfinite(far).all()
    assert far.min() < -1000


def test_points_stop_where_held_out_data_are_predicted_best():
    """A table of noise: each further step fits it more closely. The constant's density is -1.42."""
    generator = np.random.default_rng(1)
    inputs, targets = generator.normal(size=(120, 3)), generator.normal(size=120)
    new = generator.normal(size=(400, 3)), generator.normal(size=400)
    options = {**SMALL, "num_steps": 400, "refine": False}
    estimator = BayesianMLPRegressor((20,), validation_fraction=0.25, **options)
    assert estimator.fit(inputs, targets).log_density(*new).mean() > -1.7


def test_points_of_few_rows_hold_out_a_fifth():
    generator = np.random.default_rng(0)
    inputs, targets = generator.normal(size=(60, 2)), generator.normal(size=60)
    found = [
        BayesianMLPRegressor((4,), **SMALL, refine=False, validation_fraction=share)
        .fit(inputs, targets)
        .predict(inputs)
        for share in (0.01, 0.2, 0.3)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[1] != found[2]).all()


def test_chains_sample_the_scales_of_layers_and_of_inputs(table):
    """From points under normals, whose values are the first ones of the chains."""
    inputs, targets = table
    found = BayesianMLPRegressor((4,), **CHAINS).fit(inputs, targets)
    points = BayesianMLPRegressor((4,), **SMALL, refine=False, validation_fraction=0).fit(
        inputs, targets
    )
    assert found.guide_.model is found.model_
    for mine, other in zip(found.guide_.members, points.guide_.members, strict=True):
        torch.testing.assert_close(mine.median(), other.median(), rtol=0, atol=0)
    normal = BayesianMLPRegressor((4,), **CHAINS, prior_df=None).fit(inputs, targets)
    of_kinds = ((found, IsotropicStudentT), (points, Independent), (normal, Independent))
    for estimator, kind in of_kinds:
        sites = find_declared_sites(estimator.model_)
        assert {type(site.prior) for site in sites.values()} == {kind}
    of_inputs = {name: site.prior.dim for name, site in find_declared_sites(found.model_).items()}
    assert of_inputs.pop("net.net.0.weight") == 1
    assert {*of_inputs.values()} == {None}
    mixture = BayesianMLPRegressor((4,), **SMALL, posterior="mixture", refine=False, kl_weight=0.3)
    of_layers = find_declared_sites(mixture.fit(inputs, targets).model_).values()
    assert {(type(site.prior), site.prior.dim) for site in of_layers} == {(IsotropicStudentT, None)}


def test_class_weights_are_weights_of_examples():
    inputs, labels = load_iris(return_X_y=True)
    names = np.array(["a", "b", "c"])[labels]
    keep = np.r_[0:50, 50:70, 100:110]
    inputs, names = inputs[keep], names[keep]
    weights = np.array([80 / (3 * np.sum(names == name)) for name in names])
    balanced = BayesianMLPClassifier((4,), class_weight="balanced", **POINT).fit(inputs, names)
    weighed = BayesianMLPClassifier((4,), **POINT).fit(inputs, names, sample_weight=weights)
    plain = BayesianMLPClassifier((4,), **POINT).fit(inputs, names)
    found = [each.predict_proba(inputs) for each in (balanced, weighed, plain)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)
    assert found[0][-10:, 2].mean() > found[2][-10:, 2].mean()  # of the rare class
    assert [*balanced.classes_] == ["a", "b", "c"]
    np.testing.assert_allclose(found[0].sum(-1), 1.0)


def test_balanced_classes_count_examples_by_their_weights():
    """An example of weight 2 counts twice, and one of weight 0 is absent."""
    inputs, labels = load_iris(return_X_y=True)
    inputs, labels = inputs[::5], labels[::5]
    number = np.ones(30, dtype=int)
    number[:3], number[25:] = 2, 0
    repeated = np.repeat(np.arange(30), number)
    make = partial(BayesianMLPClassifier, (4,), class_weight="balanced", **POINT)
    found = make().fit(inputs, labels, sample_weight=number)
    other = make().fit(inputs[repeated], labels[repeated])
    np.testing.assert_allclose(found.predict_proba(inputs), other.predict_proba(inputs), rtol=1e-9)


def test_held_out_examples_count_by_their_weights():
    """Noise without weight decides neither the gradients nor when the training stops.

    Each row is there twice. A copy with the same target is predicted better at each further step.
    """
    generator = np.random.default_rng(0)
    inputs, targets = (
        generator.normal(size=(40, 5)).repeat(2, 0),
        generator.normal(size=40).repeat(2),
    )
    is_copy = np.arange(80) % 2 == 1
    options = {**POINT, "num_steps": 200, "validation_fraction": 0.25}
    found = []
    for copies in (targets, generator.normal(size=80)):
        own = np.where(is_copy, copies, targets)
        estimator = BayesianMLPRegressor((20,), **options)
        estimator.fit(inputs, own, sample_weight=np.where(is_copy, 1e-30, 1.0))
        found.append(estimator.predict(inputs))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


def test_any_guide_is_a_posterior(table):
    inputs, targets = table
    make_guide = partial(ps.KTiedGuide, rank=1)
    estimator = BayesianMLPRegressor((4,), **POINT | {"posterior": make_guide}).fit(inputs, targets)
    assert isinstance(estimator.guide_, ps.KTiedGuide)
    for name in ("ensemble", "mixture"):
        estimator = BayesianMLPRegressor((4,), **POINT | {"posterior": name}).fit(inputs, targets)
        draws = estimator.draws_["net.net.0.weight"]
        assert len(draws) == (2 if name == "ensemble" else 200)


@pytest.mark.parametrize("posterior", ["ensemble", "mixture", *base.POSTERIORS])
def test_a_skip_layer_adds_a_linear_map_of_the_inputs(table, posterior):
    inputs, targets = table
    options = POINT | {"skip": True, "num_steps": 5, "posterior": posterior}
    estimator = BayesianMLPRegressor((4,), **options).fit(inputs, targets)
    before, slopes = estimator.predict(inputs), estimator.draws_["net.skip.weight"]
    for draw in slopes:
        draw += torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.0, 0.0]])
    added = estimator.x_scaler_.transform(inputs) @ [0.5, -1.0, 2.0]
    expected = before + estimator.y_scaler_.scale_[0] * added
    np.testing.assert_allclose(estimator.predict(inputs), expected, rtol=1e-10)


def test_inputs_are_mapped_to_the_output_unless_they_are_more_than_the_rows():
    generator = np.random.default_rng(0)
    for size, options, has_skip in ((20, {}, True), (21, {}, False), (21, {"skip": True}, True)):
        inputs = generator.normal(size=(20, size))
        estimator = BayesianMLPRegressor((4,), **POINT | {"num_steps": 2} | options)
        draws = estimator.fit(inputs, inputs[:, 0]).draws_
        assert ("net.skip.weight" in draws) == has_skip
    twice = np.tile(inputs, (2, 1))  # rows that are repeated are no others
    estimator.set_params(skip="auto").fit(twice, twice[:, 0])
    assert "net.skip.weight" not in estimator.draws_
    for options in ({"skip": False}, {"skip": "auto", "hidden_layer_sizes": ()}):
        estimator.set_params(**options).fit(inputs[:, :3], inputs[:, 0])
        assert "net.skip.weight" not in estimator.draws_


@pytest.mark.parametrize(("size", "share"), [(16, 1.0), (64, 0.5)])
@pytest.mark.parametrize("posterior", ["ensemble", "mixture"])
def test_the_prior_of_a_map_of_many_inputs_has_the_variance_of_sixteen(size, share, posterior):
    inputs = np.random.default_rng(0).normal(size=(70, size))
    options = {"num_steps": 2, "prior_scale": 3.0, "posterior": posterior}
    estimator = BayesianMLPRegressor((4,), **POINT | options).fit(inputs, inputs[:, 0])
    usual = 3.0 if posterior == "ensemble" else 1.5  # whose heavy tails learn the scale
    for name, found in find_declared_sites(estimator.model_).items():
        of_inputs = name in ("net.net.0.weight", "net.skip.weight")
        expected = usual * (share if of_inputs else 1.0)
        np.testing.assert_allclose(base_of(found.prior).scale, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("refine", "most", "expected"),
    [
        ("auto", 59, "mixture"),
        ("auto", 60, "ensemble"),
        (False, 59, "ensemble"),
        pytest.param(True, 59, "ensemble", marks=pytest.mark.slow),
    ],
)
def test_the_default_posterior_of_many_examples_is_a_mixture(
    table, monkeypatch, refine, most, expected
):
    monkeypatch.setattr(base, "REFINED", most)
    few = {"num_steps": 5, "num_sampling_steps": 20, "kl_weight": 0.1}
    estimator = BayesianMLPRegressor((4,), **CHAINS | few | {"refine": refine}).fit(*table)
    assert estimator.posterior_ == expected
    assert hasattr(estimator.draws_, "r_hat") == (expected == "ensemble" and refine is not False)
    assert isinstance(estimator.guide_, ps.EnsembleGuide) == (expected == "ensemble")


def test_wrong_options_and_parts_of_the_data_are_refused(table):
    for option, message in (
        ({"posterior": "exact"}, "`posterior` must be one of"),
        ({"activation": "sin"}, "`activation` must be one of"),
        ({"refine": "no"}, "`refine` must be True, False or"),
        ({"dtype": "float16"}, '`dtype` must be "float32" or "float64"'),
        ({"prior_scale": 0.0}, "`prior_scale` must be a positive number"),
        ({"prior_df": 0.0}, "`prior_df` must be a positive number"),
        ({"noise_df": 1.0}, "`noise_df` must be above 1 and at most 200, .*None"),
        ({"noise_floor": -1.0}, '`noise_floor` must be a finite number of at least 0 or "auto"'),
        ({"noise_df": 201.0}, "`noise_df` must be above 1 and at most 200, .*None"),
        ({"validation_fraction": -0.5}, "`validation_fraction` must be a number of at least 0"),
        ({"kl_weight": 0.0}, "`kl_weight` must be a positive number"),
        ({"num_members": 0}, "`num_members` must be a whole number of at least 1"),
        ({"num_sampling_steps": 0}, "`num_sampling_steps` must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            BayesianMLPRegressor((4,), **POINT | option).fit(*table)
    with pytest.raises(TypeError, match=r"`posterior` must return a guide .* an AutoNormal"):
        BayesianMLPRegressor((4,), **POINT | {"posterior": AutoNormal}).fit(*table)
    with pytest.raises(ValueError, match=r"`skip` must be True, False .* but got 'linear'"):
        BayesianMLPRegressor((4,), skip="linear", **POINT).fit(*table)
    for sizes in (0, (4, -1), (4.5,), "8"):
        with pytest.raises(ValueError, match="`hidden_layer_sizes` must be whole numbers"):
            BayesianMLPRegressor(sizes, **POINT).fit(*table)
    classes = np.digitize(table[0][:, 0], [-0.5, 0.5])
    for weight in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="`class_weight` must have finite weights"):
            BayesianMLPClassifier((4,), class_weight={0: weight}, **POINT).fit(table[0], classes)
    fitted = BayesianMLPRegressor((4,), **POINT).fit(*table)
    for targets in (np.zeros((2, 2)), [np.inf]):
        with pytest.raises(ValueError, match=r"y (should be a 1d array|contains infinity)"):
            fitted.log_density(table[0][:4], targets)
    with pytest.raises(ValueError, match="`n_samples` must be a whole number of at least 1"):
        fitted.sample_y(table[0], 2.5)
    assert not hasattr(BayesianMLPRegressor(), "partial_fit")
    with pytest.raises(AttributeError, match="Call `fit` with all of them"):
        BayesianMLPClassifier().partial_fit([[0.0]], [0])
