"""Tables on which the defaults of estimators once failed."""

import numpy as np
import pytest
from sklearn.datasets import make_friedman1
from sklearn.ensemble import RandomForestRegressor

from pyro_structvi.sklearn import BayesianMLPRegressor

pytestmark = pytest.mark.slow
SHORT_CHAINS = {"num_members": 4, "num_steps": 500, "random_state": 0}


def test_functions_of_few_rows_are_no_draws_of_a_wide_prior():
    """With normal priors the square of the error is 0.44 times the variance."""
    x, y = make_friedman1(325, n_features=5, noise=1.0, random_state=0)
    found = BayesianMLPRegressor(num_sampling_steps=2000, **SHORT_CHAINS).fit(x[:25], y[:25])
    assert np.square(found.predict(x[25:]) - y[25:]).mean() < 0.4 * y[25:].var()


def test_chains_find_out_which_inputs_are_irrelevant():
    """25 of 30; with one scale for each layer the error was that of the forest."""
    x, y = make_friedman1(1200, n_features=30, noise=1.0, random_state=0)
    found = BayesianMLPRegressor(num_sampling_steps=4000, **SHORT_CHAINS)
    forest = RandomForestRegressor(500, random_state=0)
    errors = [
        np.std(each.fit(x[:200], y[:200]).predict(x[200:]) - y[200:]) for each in (found, forest)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_points_use_small_differences_of_correlated_inputs_by_the_linear_map():
    """Powers of one speed, whose last digits tell the target, as in measurements of a machine."""
    generator = np.random.default_rng(0)
    wear = generator.random(3000)
    speed = generator.integers(1, 10, 3000).astype(float)
    columns = [
        speed**k * (1 + 0.025 * k * wear) + 1e-3 * speed * generator.normal(size=3000)
        for k in (1, 1.5, 2, 2.5)
    ]
    x = np.stack([3 * speed, *columns], 1)

    def error(**options):
        estimator = BayesianMLPRegressor(refine=False, num_members=2, random_state=0, **options)
        return np.std(estimator.fit(x[:2700], wear[:2700]).predict(x[2700:]) - wear[2700:])

    assert error() < 0.9 * error(skip=False)
