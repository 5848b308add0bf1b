"""The warning of a posterior that the KL has pulled back to the prior."""

import warnings

import pytest

from pyro_structvi.infer.data_warnings import warn_of_ignored_data
from pyro_structvi.infer.history import History

MESSAGE = (
    r"The expected log likelihood ends at -140 nats, and was -20 while the weight of the KL rose. "
    r"The loss is above the KL of 40: the posterior ignores most of the data. Take a guide"
)


def history(likelihood, kl, steps=400, weights=None, first=-200.0):
    """Return a history of two halves, of which the KL has its whole weight in the later one."""
    half = steps // 2
    weights = [0.1] * half + [1.0] * half if weights is None else weights
    halves = [first] + [likelihood[0]] * (half - 1) + [likelihood[1]] * half
    return History(log_likelihood=halves, elbo=halves, kl=[kl] * steps, kl_weight=weights)


def test_a_loss_above_the_kl_is_warned_of():
    with pytest.warns(UserWarning, match=MESSAGE):
        warn_of_ignored_data(history((-20.0, -140.0), 40.0))


@pytest.mark.parametrize(
    "others",
    [
        {"likelihood": (-20.0, -59.0)},  # the posterior lost less than it has learned
        {"first": -300.0},  # of what was learned since the first step most is kept
        {"likelihood": (-140.0, -20.0)},
        {"kl": -40.0},  # of points, minus a log density
        {"steps": 100},  # too few to be compared
        {"weights": [1.0] * 400},  # nothing to compare with
    ],
)
def test_others_are_not(others):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored_data(history(**({"likelihood": (-20.0, -140.0), "kl": 40.0} | others)))
