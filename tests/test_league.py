"""The league, with posteriors of other packages, and its summary on the pages."""

import json
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

import pyro_structvi as ps
from benchmarks import (
    league,
    league_problems,
    league_tables,
    methods,
    pyro_peers,
    summary,
    tables,
)
from benchmarks.laplace_peers import (
    LinearizedModel,
    each_layer,
    laplace,
    likelihood_of,
    prior_precisions,
)
from benchmarks.league_tables import HEADER, SAMPLED
from benchmarks.rows import ResultsFile, read_rows
from benchmarks.tables import three_digits
from pyro_structvi.testing.noise import assert_mean

ROWS = [
    ("p", "good", "0", "seconds", "2"),
    ("p", "good", "0", "ELBO", "-3"),
    ("p", "good", "0", "far: Wasserstein", "0.1"),
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


def assert_moments(draws, mean, covariance):
    """Assert that independent draws ``(n, D)`` have a mean and a covariance."""
    assert_mean(draws, mean)
    away = draws - mean
    assert_mean(away.unsqueeze(-1) * away.unsqueeze(-2), covariance)


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


OPTIONS = SimpleNamespace(steps=400, draws=4000, smoke=True)


def conjugate_posterior(problem):
    """Return the mean and the covariance of weights and bias, by the rule for conditional normals."""
    x = torch.cat([problem.x.double(), torch.ones(60, 1, dtype=torch.double)], 1)
    joint = x @ x.T + 0.25 * torch.eye(60, dtype=torch.double)
    gain = torch.linalg.solve(joint, x).T
    mean = (gain @ problem.y.double()).flatten()
    return mean, torch.eye(9, dtype=torch.double) - gain @ x


def small_net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


# ---- the model -----------------------------------------------------------------------------------


def test_prior_precisions_are_those_of_the_model():
    """A weight of FanIn(3, 2) has the deviation 3 / sqrt(fan_in), a bias 2."""
    model = ps.Classifier(ps.bayesianize(small_net(), ps.FanIn(3.0, 2.0)), num_data=5)
    found = prior_precisions(model, torch.zeros(5, 2))
    expected = {
        "net.0.weight": torch.full((8,), 2 / 9),
        "net.0.bias": torch.full((4,), 1 / 4),
        "net.2.weight": torch.full((12,), 4 / 9),
        "net.2.bias": torch.full((3,), 1 / 4),
    }
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected)
    by_layer = each_layer(list(found.values()))
    torch.testing.assert_close(by_layer, torch.tensor([2 / 9, 1 / 4, 4 / 9, 1 / 4]))


def test_models_that_laplace_torch_cannot_have_are_refused():
    wide = ps.bayesianize(nn.Linear(2, 1), torch.distributions.Laplace(0.0, 1.0))
    with pytest.raises(ValueError, match=r"normal priors around zero only, unlike net\.weight"):
        prior_precisions(ps.Regressor(wide, 5, 0.1), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="one prior precision for each parameter"):
        each_layer([torch.tensor([1.0, 2.0])])
    net = ps.bayesianize(nn.Linear(2, 2), 1.0)
    assert likelihood_of(ps.Classifier(net, 5)) == ("classification", 1.0)
    assert likelihood_of(ps.Regressor(net, 5, 0.3)) == ("regression", pytest.approx(0.3))
    with pytest.raises(ValueError, match="one given scale of normal noise"):
        likelihood_of(ps.Regressor(net, 5, noise="heteroscedastic"))


def test_a_linearized_net_has_the_first_two_terms():
    """Beside the Jacobian that reverse mode gives, and with several draws in one pass."""
    torch.manual_seed(0)
    net, x = small_net().double(), torch.randn(5, 2).double()
    model = ps.Classifier(ps.bayesianize(small_net().double(), 1.0), num_data=5)
    names, at = zip(*net.named_parameters(), strict=True)
    jacobian = torch.autograd.functional.jacobian(
        lambda *values: functional_call(net, dict(zip(names, values, strict=True)), (x,)), at
    )
    rows = torch.cat([own.flatten(2) for own in jacobian], 2)
    mode = parameters_to_vector(at).detach()
    draws = mode + torch.randn(7, len(mode)).double()
    expected = net(x) + torch.einsum("ncp,sp->snc", rows, draws - mode)
    found = ps.predict(LinearizedModel(model, net), {"weights": draws}, x).functions
    torch.testing.assert_close(found, expected)


# ---- laplace-torch -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _laplace_torch():
    pytest.importorskip("laplace", reason="needs laplace-torch, which is no dependency")


@pytest.mark.usefixtures("_laplace_torch")
@pytest.mark.parametrize(
    ("subset", "structure"), [("all", "full"), ("all", "kron"), ("last_layer", "full")]
)
def test_draws_of_functions_have_the_moments_that_the_package_predicts(
    subset, structure, monkeypatch
):
    import laplace as package

    made, make = [], package.Laplace
    monkeypatch.setattr(
        package, "Laplace", lambda *own, **more: made.append(make(*own, **more)) or made[0]
    )
    torch.manual_seed(0)
    problem = league_problems.two_moons()
    model, posterior, _ = laplace(subset, structure, "glm", problem, OPTIONS)
    x = problem.regions["away"][::40]
    mean, covariance = made[0]._glm_predictive_distribution(x)
    drawn = ps.predict(model, posterior, x, num_samples=OPTIONS.draws).functions
    for point in range(len(x)):
        assert_moments(drawn[:, point].double(), mean[point].double(), covariance[point].double())


# ---- Pyro ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_autonormal_is_kept_with_the_better_bound_and_finds_the_best_independent_normals(
    monkeypatch,
):
    """Of a normal posterior: its means, and the diagonal of its precision; so does mean field.

    Parameters of the worse guide, which have the same names, are not read in its place.
    """
    monkeypatch.setattr(pyro_peers, "SETTINGS", ((0.03, 0.01), (20.0, 0.1)))
    torch.manual_seed(0)
    problem = league_problems.linear_regression()
    mean, covariance = conjugate_posterior(problem)
    best = torch.linalg.inv(covariance).diagonal() ** -0.5
    options = SimpleNamespace(steps=4000, smoke=0)
    model, guide, found = pyro_peers.autoguide(AutoNormal, problem, options)
    loc, scale = (
        torch.cat([getattr(part.net, name).flatten() for name in ("weight", "bias")])
        for part in (guide.locs, guide.scales)
    )
    assert ((loc - mean).abs() / best).max() < 0.5
    assert (scale / best).log().abs().max() < 0.2
    with torch.no_grad():
        again = -Trace_ELBO(num_particles=200).loss(model, guide, problem.x, problem.y)
    assert again == pytest.approx(found["ELBO"], rel=0.1)
    assert found["gap to the evidence"] == pytest.approx(problem.evidence - found["ELBO"])
    mean_field, options = ps.MeanFieldGuide(problem.model), SimpleNamespace(steps=1000, smoke=0)
    theirs = league.train(problem, "MeanFieldGuide", mean_field, options)
    assert found["ELBO"] == pytest.approx(theirs["ELBO"], abs=0.5)


# ---- the summary ---------------------------------------------------------------------------------


MEAN_FIELD = summary.MEASURE
GOOD, ELSEWHERE = "KTiedGuide(rank=2, join_bias=False)", "RowwiseGuide(join_bias=True)"


def rows_of(problem, quantity, **own):
    """Return rows of a net whose reference mixes: distances and logarithms, by method and run."""
    rows = [(problem, "reference, again", "0", "R-hat", "1.01")]
    for method, runs in ((MEAN_FIELD, own["mean_field"]), (GOOD, own["good"])):
        for seed, (distance, log) in enumerate(runs):
            for name, value in ((quantity, distance), ("log ratio of deviations", log)):
                rows.append((problem, method, str(seed), f"far: {name}", str(value)))
    return rows


SUMMARY_ROWS = [
    *rows_of("p", "Wasserstein", mean_field=[(2, 0.5)], good=[(0.4, 0.1), (0.6, 0.3)]),
    ("p", MEAN_FIELD, "0", "seconds", "10"),
    ("p", GOOD, "0", "seconds", "20"),
    ("p", ELSEWHERE, "0", "far: Wasserstein", "1"),
    *rows_of("q", "total variation", mean_field=[(0.1, 0.5)], good=[(0.4, 0.0)] * 2),
    ("q", MEAN_FIELD, "0", "seconds", "1"),
    ("q", GOOD, "0", "seconds", "8"),
    ("line", MEAN_FIELD, "0", "far: Wasserstein", "0.2"),
    ("line", MEAN_FIELD, "0", "gap to the evidence", "3"),
    ("line", GOOD, "0", "far: Wasserstein", "0.1"),
    # Chains that do not mix are no reference.
    ("stuck", "reference, again", "0", "R-hat", "1.9"),
    ("stuck", MEAN_FIELD, "0", "far: Wasserstein", "1"),
    ("stuck", GOOD, "0", "far: Wasserstein", "100"),
]


def test_a_summary_is_a_geometric_mean_of_ratios_to_mean_field():
    """Ratios 0.25 and 4 of distances, 2 and 8 of times; the error is 0.1 / 0.5 over two nets.

    Logarithms of ratios of deviations are 0.2 and 0 over runs; the runs of one have an error of 0.1.
    """
    found = summary.summarize(SUMMARY_ROWS)
    assert set(found) == {MEAN_FIELD, GOOD}, "others were not measured everywhere"
    assert found[MEAN_FIELD][:4] == (1, 0, 1, {"p": 1, "q": 1})
    good = found[GOOD]
    assert good.by_problem == pytest.approx({"p": 0.25, "q": 4})
    assert (good.distance, good.cost, good.exact) == pytest.approx((1, 4, 0.5))
    assert good.error == pytest.approx(0.1 / 0.5 / 2)
    assert good.factor == pytest.approx(math.exp(0.1))
    assert good.factor_error == pytest.approx(math.exp(0.1) * 0.1 / 2)


def test_the_pages_show_the_summary():
    for page in summary.PAGES:
        text = page.read_text()
        assert summary.GENERATED.search(text)
        assert summary.render(text, page) == text, "python -m benchmarks.summary writes it"


@pytest.fixture(scope="module")
def found():
    return summary.summarize(read_rows(summary.RESULTS / "league.csv", HEADER))


def test_recommended_guides_are_those_that_won(found):
    rows = summary.recommended(read_rows(summary.RESULTS / "league.csv", HEADER))
    small, wide, smaller, sampled = rows[0], rows[2], rows[4], rows[5]
    closest = min(summary.CHOICES, key=lambda choice: found[choice.code].distance)
    assert f"`{closest.code}`" in small.call
    assert f"at {found[closest.code].distance:.2f} of" in small.evidence
    assert "on 4 of 5 nets" in small.evidence, "as the caption of the closest guides names them"
    assert found[SAMPLED].distance < found[closest.code].distance
    assert f"at {found[SAMPLED].distance:.2f} of" in sampled.evidence
    accuracies = re.findall(r"([\d.]+) %", wide.evidence)
    assert [float(each) for each in accuracies] == sorted(map(float, accuracies), reverse=True)
    costs = summary.step_costs("wide")
    by_page = {choice.page: choice for choice in summary.CHOICES if choice.guide != "MAPGuide"}
    for row, bound in ((wide, costs[summary.MEASURE]), (smaller, 1.0)):
        choice = next(choice for page, choice in by_page.items() if f"({page})" in row.call)
        assert costs[choice.code] < bound
        assert f"{costs[choice.code]:.1f} times" in row.cost


def test_every_guide_of_the_tables_has_its_cost():
    for net, left_out in (("small", ()), ("wide", methods.TOO_LARGE_FOR_WIDE)):
        expected = {own.code for own in summary.CHOICES if own.guide not in left_out}
        assert summary.step_costs(net).keys() - {methods.DETERMINISTIC} == expected


ROW = re.compile(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_costs_that_are_written_by_hand_are_those_of_the_results():
    small = json.loads((summary.RESULTS / "bench.json").read_text())["nets"]["small"]["methods"]
    text = (summary.ROOT / "docs/how_to/speed.md").read_text()
    rows = ROW.findall(text.partition("## Nets of other libraries")[0])
    kinds = "", ", traced", ", compiled"
    assert len(rows) >= 4
    for name, *shown in rows:
        ratios = [small[f"{name}{kind}"]["step"]["ratio"][1] for kind in kinds]
        assert shown == [*map(three_digits, ratios)], name
    text = (summary.ROOT / "docs/how_to/training.md").read_text()
    number = re.search(r"A step of 20-50-10 takes ([\d.]+) times", text)[1]
    ratio, digits = small["full covariance"]["step"]["ratio"][1], len(number.partition(".")[2])
    assert number == f"{ratio:.{digits}f}"


def test_numbers_that_the_front_page_has_by_hand(found):
    text = " ".join((summary.ROOT / "README.md").read_text().split())
    assert f"`FullCovarianceGuide` ({found['FullCovarianceGuide'].distance:.2f})" in text
    assert f"differ {found['EnsembleGuide(size=5)'].factor:.0f}-fold from NUTS" in text
    spirals = {own.code: found[own.code].by_problem["spirals"] for own in summary.CHOICES}
    assert max(spirals, key=spirals.get) == "GlobalInducingGuide"
