"""The league: what is measured, what is not measured twice, and its tables."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import pyro_structvi as ps
from benchmarks import league, league_problems, league_tables, tables
from benchmarks.rows import ResultsFile, read_rows
from tests.statistics import assert_moments
from tests.test_peers import conjugate_posterior

ROWS = [
    ("p", "good", "0", "seconds", "2"),
    ("p", "good", "0", "ELBO", "-3"),
    ("p", "good", "0", "near: Wasserstein", "0.3"),
    ("p", "good", "0", "near: coverage", "0.8"),
    ("p", "good", "0", "far: Wasserstein", "0.1"),
    ("p", "good", "0", "far: difference of means", "7"),
    ("p", "good", "0", "far: coverage", "0.9"),
    ("p", "good", "1", "far: Wasserstein", "0.3"),
    ("p", "bad", "0", "seconds", "1"),
    ("p", "bad", "0", "near: Wasserstein", "0.2"),
    ("p", "bad", "0", "far: Wasserstein", "25"),
    ("p", "reference, again", "0", "R-hat", "1.25"),
    ("p", "reference, again", "0", "far: Wasserstein", "0.01"),
]


def test_processes_add_to_one_file(tmp_path):
    """Both have found no file; the second one writes no second header."""
    path = tmp_path / "league.csv"
    first, second = (ResultsFile(path, league_tables.HEADER) for _ in range(2))
    first.add(*ROWS[:3])
    second.add(*ROWS[3:])
    assert read_rows(path, league_tables.HEADER) == ROWS
    with pytest.raises(ValueError, match="must have the columns"):
        read_rows(path, ("a", "b"))


def test_a_page_shows_a_table_of_a_csv_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    ResultsFile(tmp_path / "a.csv", league_tables.HEADER).add(*ROWS)
    page = "# Title\n<!-- from a.csv -->\nold\n<!-- end -->\nrest\n"
    text = tables.render(page)
    assert league_tables.distance_table(ROWS) in text
    assert "old" not in text
    assert text.startswith("# Title\n<!-- from a.csv -->\n")
    assert text.endswith("\n<!-- end -->\nrest\n")
    assert tables.render(text) == text


def test_exact_draws_are_those_of_the_conjugate_posterior():
    torch.manual_seed(0)
    problem = league_problems.linear_regression()
    draws = problem.exact(40_000)
    flat = torch.cat([draws["net.weight"].flatten(1), draws["net.bias"]], 1).double()
    assert_moments(flat, *conjugate_posterior(problem))


def test_a_posterior_has_no_distance_from_itself_and_ratios_are_of_deviations():
    functions = torch.randn(50, 6, 1)
    near = SimpleNamespace(functions=functions)
    wide = SimpleNamespace(functions=functions + (functions - functions.mean(0)))
    assert league.distances("functions", near, near)["Wasserstein"] == 0
    ratio = league.distances("functions", wide, near)["ratio of standard deviations"]
    assert ratio == pytest.approx(2)
    logits = torch.randn(50, 6, 3)
    ours, theirs, shifted = (
        SimpleNamespace(functions=each, mean=each.softmax(-1).mean(0))
        for each in (logits, 0 * logits, logits + torch.randn(50, 6, 1))
    )
    found = league.distances("classes", ours, theirs)
    expected = (ours.mean - 1 / 3).abs().sum(-1).mean() / 2
    assert found["total variation"] == pytest.approx(expected.item())
    assert math.isinf(found["ratio of standard deviations"])
    same = league.distances("classes", shifted, ours)  # as all probabilities are
    assert same["log ratio of deviations"] == pytest.approx(0, abs=1e-6)


def test_spreads_are_compared_by_their_logarithms_and_a_point_has_the_worst():
    exact = torch.linspace(-1, 1, 401)[:, None].expand(-1, 3)
    wide = exact * torch.tensor([2.0, 0.5, 1.0])
    found = league.spreads(wide, exact)
    assert found["log ratio of deviations"] == pytest.approx(2 / 3 * math.log(2))
    assert found["ratio of standard deviations"] == pytest.approx(1)
    assert found["coverage"] == pytest.approx((1 + 0.45 + 0.9) / 3, abs=0.003)
    point = league.spreads(0 * exact, exact + 3)
    assert point["log ratio of deviations"] == pytest.approx(math.log(100))
    assert point["coverage"] == 0


@pytest.mark.parametrize("name", ["spirals", "clusters"])
def test_regions_lie_on_the_data_and_away_from_it(name):
    torch.manual_seed(0)
    problem = league_problems.LEAGUE[name]()
    near, far = (torch.cdist(x, problem.x).amin(1) for x in problem.regions.values())
    assert near.median() < 0.2
    assert far.median() > 0.6
    assert len(problem.x) == len(problem.y) == problem.model.num_data


def test_the_league_names_guides_by_their_calls():
    assert 'AutoLowRankLRT(rank=5, diagonal="full", join_bias=True)' in league.SHOWN
    problem = league_problems.two_moons()
    for code, make in league.SHOWN.items():
        names = vars(ps) | {"PointEstimate": ps.families.PointEstimate}
        names |= {"Dropout": ps.families.Dropout, "partial": partial}
        start, _, end = code.partition("(")
        own = eval(f"{start}(model, {end or ')'}", {**names, "model": problem.model})
        made = make(problem.model)
        for guide in (own, made):
            guide.initialize(problem.x.to(torch.get_default_dtype()), problem.y)
        assert str(own) == str(made)
        assert [*own.state_dict()] == [*made.state_dict()]


def test_the_gap_of_a_regression_is_the_middle_third(tmp_path):
    import numpy as np

    random = np.random.default_rng(0)
    x, y = random.normal(size=(90, 2)), random.normal(size=90)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    problem = league_problems.regression_gap(tmp_path / "data.npz")
    assert len(problem.x) == 60
    assert len(problem.regions["gap"]) == 30
    inside = problem.regions["gap"][:, 0]
    outside = problem.x[:, 0]
    assert ((outside < inside.min()) | (outside > inside.max())).all()
    assert problem.model.is_heteroscedastic
    assert problem.x.mean(0).abs().max() < 1e-6
    assert problem.y.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_mc_dropout_keeps_the_inputs():
    problem = league_problems.cosine_regression()
    guide = league.mc_dropout(problem.model)
    guide.initialize(problem.x)
    assert isinstance(guide["net.0.weight"].family, ps.families.PointEstimate)
    assert isinstance(guide["net.2.weight"].family, ps.families.Dropout)
