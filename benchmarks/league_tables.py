"""The league's tables and its figure, from its file of results."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, geometric_mean

from benchmarks.figure_sources import digest, metadata
from benchmarks.markdown import markdown
from benchmarks.peers import PEERS
from benchmarks.rows import Row, mean_with_error

HEADER = ("problem", "method", "seed", "quantity", "value")
TITLES = {
    "cosine": "1-D regression, 1-50-1 tanh, 100 examples",
    "moons": "Two moons, 2-20-20-2 tanh, 200 examples",
    "digits": "Digits of 4 x 4 pixels, 16-36-10 ReLU, 500 examples",
    "spirals": "Two spirals, 2-20-20-2 tanh, 200 examples",
    "clusters": "2-D regression in three clusters, 2-24-24-1 tanh, 150 examples",
    "linear": "Conjugate linear regression, 8-1, 60 examples, correlated inputs",
    "energy": "UCI energy with a gap, 8-50-2 ReLU, 512 examples",
}
CEILING, PRIOR = "reference, again", "prior"
SAMPLED = "mclmc(EnsembleGuide(size=8))"
SPREAD, COVERAGE = "log ratio of deviations", "coverage"
LARGEST_R_HAT = 1.05  # of functions; above it the draws of NUTS are no reference

Cells = dict[str, dict[str, list[float]]]  # by method and quantity, a value for each run


def by_problem(rows: Iterable[Row]) -> dict[str, Cells]:
    """Return the values of each problem by method and quantity."""
    found: dict[str, Cells] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    order = list(TITLES)
    known = sorted(rows, key=lambda row: order.index(row[0]) if row[0] in order else len(order))
    for problem, method, _, quantity, value in known:
        found[problem][method][quantity].append(float(value))
    return found


def without_peers(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of this package's posteriors and of the reference.

    Other packages have a table of their own, and their seconds were measured at another time.
    """
    return [row for row in rows if row[1] not in PEERS]


def headline(cells: Cells) -> str:
    """Return the quantity that counts: the distance in the last region."""
    region = last_region(cells)
    return next(
        quantity for own in cells.values() for quantity in own if quantity.startswith(f"{region}: ")
    )


def last_region(cells: Cells) -> str:
    """Return the region where the posterior matters most."""
    *_, last = (quantity for own in cells.values() for quantity in own if ": " in quantity)
    return last.split(": ")[0]


def mixes(cells: Cells) -> bool:
    """Whether the problem's reference was sampled, and its chains agree on the functions."""
    r_hats = cells.get(CEILING, {}).get("R-hat", [])
    return bool(r_hats) and max(r_hats) <= LARGEST_R_HAT


def is_exact(cells: Cells) -> bool:
    """Whether the problem's posterior is known in closed form: there was nothing to sample."""
    return "gap to the evidence" in {quantity for own in cells.values() for quantity in own}


def ordered(cells: Cells) -> list[str]:
    """Return the methods, the closest to the exact posterior first."""
    main = headline(cells)
    return sorted(
        (name for name in cells if main in cells[name]), key=lambda n: fmean(cells[n][main])
    )


def league_tables(rows: Iterable[Row]) -> str:
    """Return a table for each problem, the closest posterior first."""
    parts = []
    for problem, cells in by_problem(rows).items():
        quantities = list(dict.fromkeys(quantity for own in cells.values() for quantity in own))
        region = last_region(cells)
        measured = [q for q in quantities if ": " in q and shows(q)]
        shown = sorted(measured, key=lambda q: not q.startswith(f"{region}: "))
        shown += [q for q in ("ELBO", "gap to the evidence", "seconds") if q in quantities]
        body = [
            [
                method,
                *(mean_with_error(cells[method].get(quantity, []), digits) for quantity in shown),
            ]
            for method in ordered(cells)
        ]
        said = ", ".join(
            f"{quantity} {cells[CEILING][quantity][0]:.4g}"
            for quantity in ("R-hat", "effective draws", "divergences")
            if quantity in cells.get(CEILING, {})
        )
        line = f"\n\nThe worse of two runs of NUTS: {said}." if said else ""
        if said and not mixes(cells):
            line += " The chains do not mix, so the problem is in no mean."
        title = TITLES.get(problem, problem)
        parts.append(f"### {title}\n\n{markdown(['posterior', *shown], body)}{line}")
    return "\n\n".join(parts)


def distance_table(rows: Iterable[Row]) -> str:
    """Return the distance away from the data of each method on each problem, the closest first."""
    problems = by_problem(without_peers(rows))
    mains = {problem: headline(cells) for problem, cells in problems.items()}
    methods = {method for cells in problems.values() for method in cells}
    found = {
        method: {
            problem: problems[problem][method][main]
            for problem, main in mains.items()
            if main in problems[problem].get(method, {})
        }
        for method in sorted(methods)
    }
    order = sorted(
        found, key=lambda own: geometric_mean(fmean(values) for values in found[own].values())
    )
    body = [
        [
            {CEILING: "NUTS, a second run", PRIOR: PRIOR}.get(method, f"`{method}`"),
            *(mean_with_error(found[method].get(problem, []), digits) for problem in problems),
        ]
        for method in order
    ]
    titles = [
        f"{TITLES.get(problem, problem).split(', ')[0]}: {main.split(': ')[1]}"
        for problem, main in mains.items()
    ]
    return markdown(["posterior", *titles], body)


def shows(quantity: str) -> bool:
    """Whether a quantity has a column; the others are in the file."""
    hidden = ("difference of means", "of NUTS", "agreement", "ratio of standard deviations")
    return not quantity.endswith(hidden)


def label(method: str) -> str:
    """Return a method's name without its options, for figures."""
    return "MC dropout" if "Dropout(" in method else method.partition("(")[0]


def digits(value: float) -> str:
    return (
        f"{value:.1f}"
        if abs(value) >= 20
        else f"{value:.2f}"
        if abs(value) >= 1
        else f"{value:.3f}"
    )


def draw_figure(rows: Iterable[Row], path: Path) -> None:
    """Draw the distance to the exact posterior over the seconds of training, a panel each problem."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from benchmarks.distance_over_cost import plot_distance_over_cost

    rows = list(rows)
    found = by_problem(without_peers(rows))
    columns, count = min(2, len(found)), -(-len(found) // 2)
    with rc_context({"svg.hashsalt": "league", "font.size": 8}):
        # Names are placed by the size of the axes, so nothing may change it afterwards.
        figure = Figure(figsize=(6.4 * columns, 4.8 * count))
        axes = figure.subplots(count, columns, squeeze=False)
        figure.subplots_adjust(0.06, 0.05, 0.95, 0.96, wspace=0.22, hspace=0.24)
        for axis, (problem, cells) in zip(axes.flat, found.items(), strict=False):
            main = headline(cells)
            points = {
                label(method): (fmean(cells[method]["seconds"]), fmean(cells[method][main]))
                for method in ordered(cells)
                if method not in (CEILING, PRIOR)
            }
            ends = [fmean(cells[end][main]) if end in cells else None for end in (CEILING, PRIOR)]
            axis.set_title(TITLES.get(problem, problem))
            plot_distance_over_cost(points, axis, None, *ends, unit="s of CPU", label=main)
        for axis in list(axes.flat)[len(found) :]:
            axis.remove()
        figure.savefig(path, metadata=metadata(path, digest(rows)))
