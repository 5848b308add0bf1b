"""The summary of the league: its numbers, and that the advice of the pages agrees with them."""

import math
import re

import pytest

from benchmarks import summary
from benchmarks.league_tables import HEADER
from benchmarks.rows import read_rows

ROWS = [
    ("p", "mean field", "0", "far: Wasserstein", "2"),
    ("p", "mean field", "0", "seconds", "10"),
    ("p", "good", "0", "far: Wasserstein", "0.4"),
    ("p", "good", "1", "far: Wasserstein", "0.6"),
    ("p", "good", "0", "seconds", "20"),
    ("p", "elsewhere", "0", "far: Wasserstein", "1"),
    ("q", "mean field", "0", "away: total variation", "0.1"),
    ("q", "mean field", "0", "seconds", "1"),
    ("q", "good", "0", "away: total variation", "0.4"),
    ("q", "good", "0", "seconds", "8"),
]
ADVICE = (summary.ROOT / "docs" / "choosing_a_guide.md").read_text()


def test_a_summary_is_a_geometric_mean_of_ratios_to_mean_field():
    """Ratios 0.25 and 4 of distances, 2 and 8 of times; the error is 0.1 / 0.5 over two problems."""
    found = summary.summarize(ROWS)
    assert set(found) == {"mean field", "good"}, "others were not measured everywhere"
    assert found["mean field"] == (1, 0, 1, {"p": 1, "q": 1})
    good = found["good"]
    assert good.by_problem == pytest.approx({"p": 0.25, "q": 4})
    assert (good.distance, good.cost) == pytest.approx((1, 4))
    assert good.error == pytest.approx(0.1 / 0.5 / 2)


def test_the_pages_show_the_summary():
    for page in summary.PAGES:
        text = page.read_text()
        assert len(summary.GENERATED.findall(text)) == 1
        assert summary.render(text, page) == text, "python -m benchmarks.summary writes it"


@pytest.fixture(scope="module")
def found():
    return summary.summarize(read_rows(summary.RESULTS / "league.csv", HEADER))


def advised(number):
    """Return the guide that a line of the list of decisions names first."""
    line = re.search(rf"^{number}\. (.*?)(?=^\d\. |\n\n)", ADVICE, re.DOTALL | re.MULTILINE)
    code = re.search(r"`(\w+Guide[^`]*)`", line[1])[1]
    return next(choice for choice in summary.CHOICES if choice.code == code)


def test_the_first_choice_is_the_closest_to_nuts(found):
    closest = min(summary.CHOICES, key=lambda choice: found[choice.league].distance)
    assert advised(1) == closest
    assert 1.2 < found[closest.league].cost < 1.6, "about 1.4 times the time of mean field"


def test_the_choice_for_wide_layers_is_as_close_as_mean_field_and_cheaper(found):
    choice = advised(2)
    own = found[choice.league]
    assert abs(own.distance - 1) < 2 * own.error
    costs = {each: summary.step_ratio("wide", each.bench) for each in summary.CHOICES}
    smaller = advised(3)
    assert costs[choice] < costs[next(each for each in costs if each.league == "mean field")]
    assert costs[smaller] == min(cost for cost in costs.values() if cost is not None)


def test_the_scale_that_the_pages_give(found):
    """The ends, by which a reader judges the rest."""
    again, prior = (found[name].distance for name in ("reference, again", "prior"))
    assert f"of NUTS is at {again:.2f}, the prior at {prior:.1f}" in " ".join(ADVICE.split())
    assert f"a second run of NUTS {again:.2f}" in " ".join(summary.PAGES[0].read_text().split())
    assert math.isclose(found["low rank, K = 5, joined"].distance, 0.61, abs_tol=0.005)
