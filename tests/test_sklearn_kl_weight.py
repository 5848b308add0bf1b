"""The choice of the weight of the KL by estimators for tables."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from pyro_structvi.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

MIXTURE = {
    "posterior": "mixture",
    "refine": False,
    "num_steps": 6,
    "num_members": 2,
    "random_state": 0,
}


@pytest.mark.slow
def test_the_weight_of_the_kl_of_a_mixture_predicts_better():
    generator = np.random.default_rng(0)
    inputs, noise = generator.normal(size=(60, 2)), generator.normal(size=60)
    estimator = BayesianMLPRegressor((6,), **MIXTURE)
    assert estimator.fit(inputs, inputs[:, 0]).kl_weight_ == 0.1
    found = estimator.fit(inputs, noise).predict(inputs)
    assert estimator.kl_weight_ == 0.3
    # Without another weight to compare with.
    estimator.set_params(validation_fraction=0.0).fit(inputs, noise)
    np.testing.assert_array_equal(estimator.predict(inputs), found)


def test_columns_of_a_data_frame_are_compared_without_a_warning():
    """The held-out rows are arrays; the fitted estimator has the names of the columns."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "b"])
    estimator = BayesianMLPRegressor((6,), **MIXTURE).fit(frame, frame["a"])
    assert [*estimator.feature_names_in_] == ["a", "b"]
    assert estimator.kl_weight_ == 0.1
    assert np.isfinite(estimator.predict(frame)).all()


def with_scores(monkeypatch, scores):
    """Give classifiers their log densities by weight of the KL; return a list of the weights tried."""
    trained = []

    def train(self, points, data):
        trained.append(self.kl_weight_)
        return points

    def predictions(self, inputs, y):
        yield SimpleNamespace(log_density=torch.tensor([scores[trained[-1]]]))

    monkeypatch.setattr(BayesianMLPClassifier, "_fitted_mixture", train)
    monkeypatch.setattr(BayesianMLPClassifier, "_predictions", predictions)
    return trained


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({0.3: 1.0, 0.1: 1.0}, [0.3, 0.1, 0.3]),  # and not 0.03 after it
        ({0.3: 1.0, 0.1: 2.0, 0.03: 1.5}, [0.3, 0.1, 0.03, 0.1]),
        ({0.3: 1.0, 0.1: 2.0, 0.03: 3.0}, [0.3, 0.1, 0.03, 0.03]),
    ],
)
def test_smaller_weights_of_the_kl_are_tried_while_they_predict_better(
    monkeypatch, scores, expected
):
    trained = with_scores(monkeypatch, scores)
    monkeypatch.setattr(BayesianMLPClassifier, "fewest_compared", 1)
    inputs = np.random.default_rng(0).normal(size=(20, 2))
    classifier = BayesianMLPClassifier((4,), **MIXTURE)
    classifier.fit(inputs, inputs[:, 0] > 0)
    assert trained == expected


@pytest.mark.parametrize(("share", "expected"), [(0.495, [0.3]), (0.5, [0.3, 0.1, 0.3])])
def test_classifiers_compare_weights_by_a_hundred_held_out_rows(monkeypatch, share, expected):
    trained = with_scores(monkeypatch, {0.3: 1.0, 0.1: 1.0})
    inputs = np.random.default_rng(0).normal(size=(200, 2))
    classifier = BayesianMLPClassifier((4,), **MIXTURE, validation_fraction=share)
    classifier.fit(inputs, inputs[:, 0] > 0)
    assert trained == expected


@pytest.mark.slow
def test_the_weight_of_the_kl_of_a_mixture_of_classifiers_needs_a_hundred_held_out_rows():
    generator = np.random.default_rng(0)
    inputs, noise = generator.normal(size=(200, 2)), generator.normal(size=200)
    classifier = BayesianMLPClassifier((6,), **MIXTURE)
    for share, expected in ((0.495, 0.3), (0.5, 0.03)):
        classifier.set_params(validation_fraction=share).fit(inputs, inputs[:, 0] > 0)
        assert classifier.kl_weight_ == expected
    assert classifier.fit(inputs, noise > 0).kl_weight_ == 0.3
