"""The table of recommended calls, with costs and evidence from results.

``python -m benchmarks.summary`` writes it.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.choices import CHOICES, FAMILIES, Choice
from benchmarks.deep_nets_table import DEEP_NETS
from benchmarks.league_tables import CEILING, SAMPLED
from benchmarks.markdown import markdown
from benchmarks.rows import read_rows
from benchmarks.uci_tables import ESTIMATORS

RESULTS = Path(__file__).parent / "results"
WIDE_RECIPE = ("MLP", "60000 images, 10 epochs")
OF_DEEP_NETS = {  # with the one setting of the page on deep nets
    "k-tied 2, KL weight 0.05, relative scale 0.2": "KTiedGuide",
    "mean field, KL weight 0.05, relative scale 0.2": "MeanFieldGuide",
}


class Recommendation(NamedTuple):
    """A call for a kind of net.

    Attributes:
        case: The kind of net or data.
        call: The call, as markdown with a link from ``docs/``.
        cost: Its cost.
        evidence: The result that recommends it.
    """

    case: str
    call: str
    cost: str
    evidence: str


def step_costs(net: str) -> dict[str, float]:
    """Return the time of a step of ``fit`` in units of the net's own, by the guides' calls."""
    methods = json.loads((RESULTS / "costs.json").read_text())["nets"][net]["methods"]
    return {name: float(own["step"]["ratio"][1]) for name, own in methods.items()}


def for_small_nets(distances: Mapping[str, float]) -> Choice:
    """Return the guide whose predictions are closest to those of NUTS, over the nets of the league."""
    return min(FAMILIES, key=lambda choice: distances[choice.code])


def for_wide_nets() -> tuple[Choice, str, str]:
    """Return the posterior of highest likelihood on MNIST, and the results of it and of AdamW."""
    rows = read_rows(RESULTS / "deep_nets.csv", DEEP_NETS)
    found = {
        method: [
            fmean(float(row[column]) for row in rows if row[:3] == (*WIDE_RECIPE, method))
            for column in (4, 5)
        ]
        for method in [*OF_DEEP_NETS, "AdamW"]
    }
    best = min(OF_DEEP_NETS, key=lambda method: found[method][1])
    choice = next(choice for choice in CHOICES if choice.guide == OF_DEEP_NETS[best])
    own, of_adamw = (
        f"{100 * found[each][0]:.2f} %, {found[each][1]:.3f} nats" for each in (best, "AdamW")
    )
    return choice, own, of_adamw


def for_tables() -> tuple[list[float], float]:
    """Return the mean gains of the default estimator, from the least, and its median seconds.

    The gain is the log likelihood of an example over that of a deep ensemble, by sets of data. Gains and
    seconds are of the splits that both have.
    """
    rows = read_rows(RESULTS / "estimators.csv", ESTIMATORS)
    rows = [row for row in rows if not row[0].startswith("gaps of")]
    found = {row[:3]: row[3:] for row in rows if row[3]}
    gains, seconds = defaultdict[str, list[float]](list), list[float]()
    for (data, split, method), other in found.items():
        own = found.get((data, split, "chains"))
        if method == "deep ensemble" and own is not None:
            gains[data].append(float(own[0]) - float(other[0]))
            seconds.append(float(own[2]))
    return sorted(map(fmean, gains.values())), median(seconds)


def recommendations(
    distances: Mapping[str, float],
    by_net: Mapping[str, Mapping[str, float]],
    seconds_of_sampling: Mapping[str, float],
) -> list[Recommendation]:
    """Return the recommendations.

    Args:
        distances: Of predictions to those of NUTS, by calls, in units of mean field's.
        by_net: The same by calls and nets.
        seconds_of_sampling: Median seconds of a processor over nets, by method; of NUTS the slower run.
    """
    small, (wide, of_mnist, by_adamw) = for_small_nets(distances), for_wide_nets()
    gains, seconds = for_tables()
    smaller = next(choice for choice in FAMILIES if choice.guide == "InducingWeightGuide")
    of_small, of_wide = step_costs("small"), step_costs("wide")
    nets = [*by_net[small.code]]
    others = [choice.code for choice in FAMILIES if choice != small]
    won = sum(by_net[small.code][net] < min(by_net[code][net] for code in others) for net in nets)
    return [
        Recommendation(
            "a small net",
            linked(small),
            f"{of_small[small.code]:.1f} times the net's step (20-50-10)",
            f"the closest guide to NUTS on {won} of {len(nets)} nets of some hundred weights, at "
            f"{distances[small.code]:.2f} of mean field's distance",
        ),
        Recommendation(
            "a table of numbers",
            "[`BayesianMLPRegressor()`](how_to/tables.md), which samples",
            f"{seconds:.0f} s for a fit of some hundred rows",
            f"{gains[0]:.2f} to {gains[-1]:.2f} nats an example above a deep ensemble, on "
            f"{len(gains)} sets of UCI",
        ),
        Recommendation(
            "a wide net",
            f"[`{wide.guide}`]({wide.page}) with "
            "[`init_relative_scale=0.2` and `kl_weight=0.05`](how_to/deep_nets.md)",
            f"{of_wide[wide.code]:.1f} times the net's step (1024-2048-2048-10, biases apart)",
            f"MNIST (784-400-400-10): {of_mnist} of negative log likelihood; AdamW {by_adamw}",
        ),
        Recommendation(
            "a trained net",
            "[`FullCovarianceGuide`](how_to/which_weights.md) on its last layer",
            "a forward pass, and a step of that layer",
            "exact for frozen features and known noise; a few thousand elements at most",
        ),
        Recommendation(
            "a net that barely fits into memory",
            linked(smaller),
            f"{of_wide[smaller.code]:.1f} times the net's step (1024-2048-2048-10)",
            f"fewer parameters than the net; {distances[smaller.code]:.2f} of mean field's distance on "
            "small nets",
        ),
        Recommendation(
            "some hundred weights",
            "[`reference.mclmc`](how_to/reference_posteriors.md) from an `EnsembleGuide`",
            f"{seconds_of_sampling[SAMPLED]:.0f} s of a processor",
            f"chains at {distances[SAMPLED]:.2f} of mean field's distance",
        ),
        Recommendation(
            "the exact posterior of some hundred weights",
            "[`reference.nuts`](how_to/reference_posteriors.md)",
            f"{seconds_of_sampling[CEILING]:.0f} s of a processor",
            f"a second run is at {distances[CEILING]:.2f} of mean field's distance",
        ),
    ]


def linked(choice: Choice) -> str:
    return f"[`{choice.code}`]({choice.page})"


def recommendation_table(rows: Sequence[Recommendation], folder: str) -> str:
    """Return the table of recommendations.

    Args:
        rows: The recommendations.
        folder: The path to ``docs/`` from the page.
    """
    body = [[row.case, row.call.replace("](", f"]({folder}"), *row[2:]] for row in rows]
    return markdown(["if you have", "use", "cost", "evidence"], body)


def recommended_for(choice: Choice, rows: Sequence[Recommendation]) -> str:
    """Return a sentence with the case that a guide is recommended for; empty if there is none."""
    cases = [row.case for row in rows if f"]({choice.page})" in row.call]
    return f"Recommended for {' and '.join(cases)}." if cases else ""
