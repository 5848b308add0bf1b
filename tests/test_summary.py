"""The summary of the league: its numbers, and that the advice of the pages agrees with them."""

import json
import math
import re

import pytest

from benchmarks import methods, recommendation, summary
from benchmarks.league_tables import HEADER
from benchmarks.rows import read_rows
from benchmarks.tables import three_digits

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


ROWS = [
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
    found = summary.summarize(ROWS)
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


def recommended(found):
    by_net = {name: own.by_problem for name, own in found.items()}
    distances = {name: own.distance for name, own in found.items()}
    return recommendation.recommendations(distances, by_net, 0.1)


def test_recommended_guides_are_those_that_won(found):
    rows = recommended(found)
    small, wide, smaller = rows[0], rows[2], rows[4]
    closest = min(summary.CHOICES, key=lambda choice: found[choice.code].distance)
    assert f"`{closest.code}`" in small.call
    assert f"at {found[closest.code].distance:.2f} of" in small.evidence
    assert "on 4 of 5 nets" in small.evidence, "as the caption of the closest guides names them"
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


WRITTEN = {
    ("how_to/training.md", "A step of 20-50-10 takes {} times", "small", "full covariance"),
}
ROW = re.compile(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_costs_that_are_written_by_hand_are_those_of_the_results():
    nets = json.loads((summary.RESULTS / "bench.json").read_text())["nets"]
    text = (summary.ROOT / "docs/how_to/speed.md").read_text()
    rows = ROW.findall(text.partition("## Nets of other libraries")[0])
    small = nets["small"]["methods"]
    assert rows == [
        (
            name,
            *(
                three_digits(small[f"{name}{kind}"]["step"]["ratio"][1])
                for kind in ("", ", traced", ", compiled")
            ),
        )
        for name, *_ in rows
    ]
    assert len(rows) >= 4
    for page, sentence, net, method in WRITTEN:
        ratio = nets[net]["methods"][method]["step"]["ratio"][1]
        text = (summary.ROOT / "docs" / page).read_text()
        number = next(re.finditer(re.escape(sentence).replace(r"\{\}", r"([\d.]+)"), text))[1]
        digits = len(number.partition(".")[2])
        assert number == f"{ratio:.{digits}f}", sentence


def test_numbers_that_the_front_page_has_by_hand(found):
    text = " ".join((summary.ROOT / "README.md").read_text().split())
    assert f"`FullCovarianceGuide` ({found['FullCovarianceGuide'].distance:.2f})" in text
    assert f"differ {found['EnsembleGuide(size=5)'].factor:.0f}-fold from NUTS" in text
    spirals = {own.code: found[own.code].by_problem["spirals"] for own in summary.CHOICES}
    assert max(spirals, key=spirals.get) == "GlobalInducingGuide"
