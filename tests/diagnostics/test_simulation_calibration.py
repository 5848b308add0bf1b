"""Simulation-based calibration: uniform ranks at exact posteriors, the shape of errors elsewhere."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chi2, chisquare
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import simulation_based_calibration
from pyro_structvi.diagnostics import simulation_calibration as calibration
from tests.diagnostics.conjugate import SITE, exact, make_model

FALSE_ALARM = 1e-6
INPUTS = torch.tensor([[1.0, 0.0], [0.5, -1.0], [-2.0, 0.3], [0.1, 0.7]], dtype=torch.float64)


def make():
    return make_model(len(INPUTS), 2)


def exact_fit(width=1.0, shift=0.0, draws=19):
    """Return a fit with the exact posterior, its standard deviations times a width, means shifted."""

    def fit(model, x, y):
        known = exact(x, y)
        tril = width * torch.linalg.cholesky(known.covariance)
        noise = torch.randn(draws, 1, 2)
        return {SITE: known.mean + shift + noise @ tril.mT}

    return fit


def test_ranks_of_the_exact_posterior_are_uniform():
    """Five quantities; a chi-square test each, P = 1e-6 in all."""
    found = simulation_based_calibration(make, exact_fit(), INPUTS, 100, 19)
    assert [*found.ranks] == [*(f"f(x[{number}])" for number in range(4)), "log likelihood"]
    for name, ranks in found.ranks.items():
        assert ranks.shape == (100,)
        assert 0 <= ranks.min() < ranks.max() <= 19
        assert found.p_values[name] > FALSE_ALARM / len(found.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "where"), [(0.2, "ends"), (5.0, "middle")])
def test_a_wrong_width_shows(width, where):
    found = simulation_based_calibration(make, exact_fit(width), INPUTS, 60, 19)
    for name in ("f(x[0])", "f(x[1])"):
        at_ends = ((found.ranks[name] < 2) | (found.ranks[name] > 17)).double().mean()
        assert found.p_values[name] < 1e-6
        assert at_ends > 0.6 if where == "ends" else at_ends < 0.02  # where 0.2 is expected


def test_a_shift_shows_at_one_end():
    found = simulation_based_calibration(make, exact_fit(shift=2.0), INPUTS, 40, 19)
    assert (found.ranks["f(x[0])"] == 0).double().mean() > 0.9
    assert found.p_values["f(x[0])"] < 1e-6


def test_the_prior_is_no_posterior_though_function_values_cannot_tell():
    """Draws of the prior have uniform ranks by every quantity without data; the log likelihood tells.

    Modrak et al. (2023), section 1.
    """

    def prior(model, x, y):
        return {SITE: torch.randn(19, 1, 2)}

    found = simulation_based_calibration(make, prior, INPUTS, 60, 19)
    assert found.p_values["log likelihood"] < 1e-6
    assert found.p_values["f(x[0])"] > FALSE_ALARM / 4


def test_a_guide_is_fitted_to_what_the_model_made():
    """The guide of the exact posterior, and a quantity of the weights; P = 1e-6."""
    seen = []

    def fit(model, x, y):
        known, guide = exact(x, y), ps.FullCovarianceGuide(model)
        seen.append(y)
        tril = torch.linalg.cholesky(known.covariance)
        with torch.no_grad():
            guide[SITE].loc.copy_(known.mean)
            guide[SITE].log_diagonal.copy_(tril.diagonal().log())
            guide[SITE].lower.copy_((tril / tril.diagonal().unsqueeze(-1))[1, 0].reshape(1))
        return guide

    functions = {"first weight": lambda draw: draw.values[SITE][0, 0]}
    found = simulation_based_calibration(make, fit, INPUTS, 40, 9, functions)
    assert found.num_samples == 9
    assert found.p_values["first weight"] > FALSE_ALARM
    assert len(seen) == 40
    assert not torch.equal(seen[0], seen[1])


def test_draws_have_function_and_log_likelihood_of_the_model():
    draws = []

    def keep(draw):
        draws.append(draw)
        return 0.0

    def fit(model, x, y):
        fit.y = y
        return exact_fit(draws=5)(model, x, y)

    found = simulation_based_calibration(make, fit, INPUTS, 10, 5, {"any": keep})
    for draw in draws[-6:]:
        function = INPUTS @ draw.values[SITE].mT
        torch.testing.assert_close(draw.function, function, rtol=1e-12, atol=1e-12)
        density = dist.Normal(function, 0.5).log_prob(fit.y).squeeze(-1)
        torch.testing.assert_close(draw.log_likelihood, density, rtol=1e-9, atol=1e-9)
    # All draws are ties, whose part is random: 10 ranks from 0 to 5.
    assert len(found.ranks["any"].unique()) > 1


# ---- ranks and their test ---------------------------------------------------------------------------


def test_a_rank_counts_the_draws_below():
    assert calibration._rank(0.5, [0.1, 0.7, 0.2, 0.9]) == 2
    assert calibration._rank(-1.0, [0.1, 0.7]) == 0


def test_ties_count_a_random_part():
    """Uniform over 1, 2, 3 with two ties and one draw below; chi-square with P = 1e-6."""
    ranks = torch.tensor([calibration._rank(0.0, [-1.0, 0.0, 0.0, 2.0]) for _ in range(600)])
    counts = torch.bincount(ranks, minlength=4)
    assert counts[0] == 0
    assert float(((counts[1:] - 200) ** 2 / 200).sum()) < chi2.isf(FALSE_ALARM, 2)


@pytest.mark.parametrize("num_samples", [9, 99, 7])
def test_p_values_by_the_definition(num_samples):
    """Ranks in bins whose numbers of ranks differ by one at most."""
    ranks = torch.randint(num_samples + 1, (50,))
    bins = 5
    shares = [
        sum(rank * bins // (num_samples + 1) == each for rank in range(num_samples + 1))
        / (num_samples + 1)
        for each in range(bins)
    ]
    counts = [
        sum(int(rank) * bins // (num_samples + 1) == each for rank in ranks) for each in range(bins)
    ]
    statistic = sum((c - 50 * p) ** 2 / (50 * p) for c, p in zip(counts, shares, strict=True))
    assert calibration._p_value(ranks, num_samples) == pytest.approx(chi2.sf(statistic, bins - 1))


def test_bins_are_bounded():
    ranks = torch.arange(1000) % 500
    assert calibration._p_value(ranks, 499) == pytest.approx(chisquare([50.0] * 20).pvalue)
    assert calibration._p_value(torch.zeros(10, dtype=torch.long), 1) < 0.01  # 10 to 0 in two bins


# ---- models and what is refused ----------------------------------------------------------------------


def hand_written(x, y=None):
    weight = pyro.sample("weight", dist.Normal(0.0, torch.tensor(1.0)))
    with pyro.plate("data", len(x)):
        pyro.sample("target", dist.Normal(weight * x, 1.0), obs=y)


def test_a_model_that_returns_nothing_and_names_no_observation():
    def fit(model, x, y):
        precision = 1 + x.square().sum()
        return {"weight": (x * y).sum() / precision + torch.randn(9) / precision.sqrt()}

    x = torch.tensor([1.0, 2.0, -1.0])
    found = simulation_based_calibration(lambda: hand_written, fit, x, 20, 9, site="target")
    assert [*found.ranks] == ["f(x[0])", "f(x[1])", "f(x[2])", "log likelihood"]
    with pytest.raises(ValueError, match=r"must be one of \['weight', 'target'\].*`site=None`"):
        simulation_based_calibration(lambda: hand_written, fit, x, 20, 9)


def call(**options):
    options = {"make_model": make, "fit": exact_fit(), "num_simulations": 10} | options
    return simulation_based_calibration(x=INPUTS, num_samples=19, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"make_model": lambda: None},
            TypeError,
            r"`make_model\(\)` must return a model.*got None",
        ),
        ({"make_model": lambda: nn.Linear}, TypeError, "must return a model, but got the class"),
        ({"fit": lambda *_: 3}, TypeError, r"`fit\(model, x, y\)` must return a guide .* got 3"),
        ({"fit": lambda *_: ps.MAPGuide}, TypeError, "must return a guide .* the class MAPGuide"),
        ({"fit": lambda *_: {}}, TypeError, "must return a guide or a dict of draws"),
        ({"fit": exact_fit(draws=5)}, ValueError, "`num_samples` must be at most the 5 draws"),
        ({"num_simulations": 9}, ValueError, "`num_simulations` must be at least 10, .* got 9"),
        ({"functions": {}}, ValueError, "`functions` must hold at least one test quantity"),
        (
            {"functions": {"all": lambda draw: draw.function}},
            ValueError,
            r"`functions\['all'\]` must return one number .* of shape \(4, 1\)",
        ),
        (
            {"functions": {"nothing": lambda draw: math.nan}},
            ValueError,
            r"`functions\['nothing'\]` must return one number that is not NaN, but got nan",
        ),
        ({"functions": {"a": lambda draw: "b"}}, ValueError, "must return one number"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        call(**options)
