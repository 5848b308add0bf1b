"""Tables that estimators take: dtypes of targets and units of weights."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from pyro_structvi.sklearn import BayesianMLPRegressor

X = np.linspace(-1.0, 1.0, 40).reshape(-1, 1)
OPTIONS = {"num_members": 2, "num_steps": 5, "refine": False, "random_state": 0}


@pytest.mark.parametrize("dtype", ["U", "timedelta64[s]", "datetime64[s]"])
def test_targets_of_a_regression_are_numbers(dtype):
    with pytest.raises(
        ValueError, match=r"`y` must be numbers, but got dtype .*BayesianMLPClassifier"
    ):
        BayesianMLPRegressor((4,), **OPTIONS).fit(X, np.arange(40).astype(dtype))


def test_the_scale_of_columns_does_not_depend_on_the_unit_of_weights():
    """The sum of the weights counts for scikit-learn as a number of examples, and of rounding errors."""
    weights = np.linspace(1.0, 2.0, 40)
    scales = []
    for unit in (1.0, 2.0**50):
        estimator = BayesianMLPRegressor((4,), **OPTIONS)
        estimator.fit(X, X[:, 0] ** 2, sample_weight=unit * weights)
        scales.append((estimator.x_scaler_.scale_, estimator.y_scaler_.scale_))
    np.testing.assert_allclose(scales[0], scales[1], rtol=1e-12)
