"""Tables of committed results: ``python -m benchmarks.tables`` writes them into the documentation."""

import argparse
import json
import math
import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import league_tables, moments_table, paper_tables, uci_priors_table, uci_tables
from benchmarks.active_table import ACTIVE, active_table
from benchmarks.deep_nets_table import DEEP_NETS, deep_nets_tables
from benchmarks.markdown import markdown
from benchmarks.optimization_table import OPTIMIZATION, optimization_table
from benchmarks.rows import read_rows

# A posterior, and one that contains it, whose best ELBO is at least as high.
NESTED = [
    ("k-tied 1", "k-tied 2"),
    ("k-tied 2", "mean field"),
    ("k-tied 1", "matrix normal"),
    ("matrix normal", "full"),
    ("mean field", "eigenbasis"),
    ("matrix normal", "eigenbasis"),
    ("mean field", "rowwise"),
    ("rowwise", "full"),
    ("low rank 1", "low rank 2"),
    ("low rank 2", "low rank 2, full diagonal"),
    ("mean field", "low rank 2, full diagonal"),
    ("low rank 2, full diagonal", "full"),
    ("FFG-U", "FCG-U"),
]

ROOT = REPOSITORY = Path(__file__).parents[1]
PAGES = [
    *(
        page
        for page in sorted((ROOT / "docs").glob("**/*.md"))
        if "<!-- from benchmarks/results/" in page.read_text()
    ),
    *sorted((ROOT / "examples" / "papers").glob("*/README.md")),
]
GENERATED = re.compile(
    r"(<!-- from (?P<file>\S+\.(json|csv)) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT, help="a folder, for the same tree")
    options = parser.parse_args()
    for page in PAGES:
        text = render(page.read_text())
        path = options.output / page.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(text)


def write_results(results: dict[str, Any], path: Path) -> None:
    """Write a JSON file, with what is innermost on one line."""
    text = json.dumps(results, indent=1)
    for inner in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(inner, lambda match: " ".join(match[0].split()), text)
    path.write_text(text + "\n")


def render(text: str) -> str:
    """Put the tables of the files that a page names in place of those it has."""

    def replace(match: re.Match[str]) -> str:
        path = ROOT / match["file"]
        if path.suffix == ".csv":
            return f"{match[1]}\n{tables_of(path)}\n\n{match['end']}"
        results = json.loads(path.read_text())
        write = next(write for kind, write in WRITERS.items() if kind in results)
        return f"{match[1]}\n{write(results)}\n\n{match['end']}"

    return GENERATED.sub(replace, text)


def tables_of(path: Path) -> str:
    """Return the tables of a file of rows, by its columns."""
    header = tuple(path.read_text().splitlines()[0].split(","))
    if header == DEEP_NETS:
        return deep_nets_tables(read_rows(path, header))
    if header == ACTIVE:
        return active_table(read_rows(path, header))
    if header == OPTIMIZATION:
        return optimization_table(read_rows(path, header))
    if header == uci_tables.DECOMPOSED:
        return markdown(list(header[2:]), [list(row[2:]) for row in read_rows(path, header)])
    if header in (uci_tables.ESTIMATORS, uci_tables.CLASSIFIERS):
        return uci_tables.estimators_table(read_rows(path, header), header)
    if path.name == "moments.csv":
        return moments_table.moments_table(read_rows(path, header))
    if header == paper_tables.HEADER:
        return paper_tables.paper_tables(path)
    write = {
        uci_priors_table.HEADER: uci_priors_table.learned_table,
        uci_tables.HEADER: uci_tables.likelihood_table,
        league_tables.HEADER: league_tables.distance_table,
    }[header]
    return write(read_rows(path, header))


def machine_line(results: dict[str, Any]) -> str:
    machine = results["machine"]
    text = f"torch {machine['torch']}, Pyro {machine['pyro']}, {machine['device']}"
    return f"{text}, {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"


# ---- of nets -------------------------------------------------------------------------------------

SHOWN_NETS = ("small", "mnist", "wide", "lenet", "resnet18", "lstm")
VARIANTS = (", traced", ", compiled", ", one pass")


def cost_table(results: dict[str, Any]) -> str:
    """Return the table of ordinary and traced steps, over the net's own step, and how they vary."""
    nets = [results["nets"][name] for name in SHOWN_NETS]
    guides = dict.fromkeys(
        title for net in nets for title in net["methods"] if not title.endswith(VARIANTS)
    )
    base, *others = guides
    own = [f"{three_digits(net['methods'][base]['step']['milliseconds'][1])} ms" for net in nets]
    body = [
        [title.replace("drawn", "weights sampled"), *(step_medians(net, title) for net in nets)]
        for title in others
    ]
    table = markdown(["step", *(net["title"] for net in nets)], [["the net's own", *own], *body])
    return f"{spread_line(results, nets)}\n\n{table}"


def step_medians(net: dict[str, Any], title: str) -> str:
    """Return the median ratios of an ordinary and a traced step, where they were measured."""
    kinds = [net["methods"][kind] for kind in (title, f"{title}, traced") if kind in net["methods"]]
    return " / ".join(three_digits(kind["step"]["ratio"][1]) for kind in kinds)


def spread_line(results: dict[str, Any], nets: list[dict[str, Any]]) -> str:
    """Return the line on the processor, and how far quartiles are from medians."""
    spreads = [
        max(high / middle, middle / low) - 1
        for net in nets
        for method in net["methods"].values()
        for low, middle, high in (task["ratio"] for task in method.values())
    ]
    return (
        f"{machine_line(results)}. Medians of {min(net['rounds'] for net in nets)} to "
        f"{max(net['rounds'] for net in nets)} rounds; quartiles are typically within "
        f"{100 * median(spreads):.0f} % of the median, and at most {100 * max(spreads):.0f} % from it."
    )


def net_table(net: dict[str, Any]) -> str:
    """Return the table of one net: ratios to the first row, which is given in words."""
    base, *_ = net["methods"].values()
    rows = []
    for title, method in net["methods"].items():
        row = [title]
        for task in base:
            if task not in method:
                row += [""] * 3
                continue
            own = method[task]
            low, middle, high = map(three_digits, own["ratio"])
            memory = three_digits(own["bytes"] / base[task]["bytes"]) if "bytes" in own else ""
            row += [middle, f"{low} - {high}", memory]
        rows.append(row)
    head = ["", *("step", "quartiles", "memory"), *("prediction", "quartiles", "memory")]
    itself = "; ".join(
        f"{task} {three_digits(own['milliseconds'][1])} ms"
        + (f", {three_digits(own['bytes'] / 2**20)} MiB" if "bytes" in own else "")
        for task, own in base.items()
    )
    return f"{markdown(head, rows)}\n\n1.00 is: {itself}. {net['rounds']} rounds."


def three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


# ---- of sweeps -----------------------------------------------------------------------------------


def scaling_tables(results: dict[str, Any]) -> str:
    parts = [f"{machine_line(results)}; {results['rounds']} rounds."]
    for sweep in results["sweeps"].values():
        rows = [
            exponents_row(title, method["exponents"]) for title, method in sweep["methods"].items()
        ]
        head = [sweep["title"], "fitted from", "to", "gradients", "step", "Table 1", "our count"]
        parts.append(markdown(head, rows))
    return "\n\n".join(parts)


def exponents_row(title: str, fit: dict[str, Any]) -> list[str]:
    ends = [str(fit["fitted"][0]), str(fit["fitted"][-1])]
    measured = [f"{fit[task][0]:.2f} ± {fit[task][1]:.2f}" for task in ("gradients", "step")]
    counted = [f"{fit[source]:.2f}" if source in fit else "" for source in ("paper", "ours")]
    return [title, *ends, *measured, *counted]


# ---- of training ---------------------------------------------------------------------------------

DEFAULT, FULL_KL = "default", "whole KL"


def convergence_table(results: dict[str, Any], recipe: str = DEFAULT) -> str:
    """Return the ELBO of each guide on each problem after all steps, and a line for each problem."""
    problems = [own for own in results["convergence"].values() if recipe in own["recipes"]]
    found = {net_of(own): own["recipes"][recipe] for own in problems}
    guides = dict.fromkeys(guide for rows in found.values() for guide in rows)
    steps = len(results["steps"])
    body = [
        [guide, *(last_elbo(rows.get(guide), steps) for rows in found.values())] for guide in guides
    ]
    body.append(["log evidence", *(evidence(own["evidence"]) for own in problems)])
    errors = [row["error"][-1] for rows in found.values() for row in rows.values() if row["error"]]
    line = (
        f"{machine_line(results)}. ELBOs of {results['particles']} particles after "
        f"{results['steps'][-1]:,} steps; standard errors are at most {max(errors, default=0):.1f} nats."
    )
    lines = [f"- {net}: {out_of_order(rows)}." for net, rows in found.items()]
    head = "Nested pairs whose larger posterior ends lower"
    if recipe == DEFAULT:
        head += "; then guides that end elsewhere with the full KL from the first step"
        lines = [
            f"{pairs[:-1]}; {gains(own['recipes'])}."
            for pairs, own in zip(lines, problems, strict=True)
        ]
    return "\n\n".join([line, markdown(["guide", *found], body), f"{head}:", "\n".join(lines)])


def net_of(problem: dict[str, Any]) -> str:
    """Return the sizes of a problem's net, from its title."""
    return str(problem["title"].split(", ")[1])


def last_elbo(row: dict[str, list[float]] | None, steps: int) -> str:
    if row is None:
        return ""
    return f"{row['elbo'][-1]:.1f}" if len(row["elbo"]) == steps else "diverged"


def evidence(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def gains(recipes: dict[str, Any]) -> str:
    """Return how many guides end higher and lower with the full KL than by default, in words."""
    ours, theirs = recipes[DEFAULT], recipes.get(FULL_KL, {})
    shared = [guide for guide in ours if theirs.get(guide, {}).get("elbo")]
    differences = []
    for guide in shared:
        gain = theirs[guide]["elbo"][-1] - ours[guide]["elbo"][-1]
        noise = 2 * math.hypot(theirs[guide]["error"][-1], ours[guide]["error"][-1])
        differences.append(gain if abs(gain) > max(noise, 0.1) else 0.0)
    parts = []
    for word, sign in (("higher", 1), ("lower", -1)):
        own = [abs(value) for value in differences if sign * value > 0]
        parts += [f"{len(own)} {word} by up to {max(own):.1f}"] if own else []
    return f"{', '.join(parts) or 'none'} (of {len(shared)})"


def out_of_order(rows: dict[str, Any]) -> str:
    """Return the pairs whose larger posterior ends lower, in words, by how many nats."""
    found, pairs = violations(rows)
    text = "; ".join(f"{large} below {small} by {below:.1f}" for small, large, below in found)
    return f"{text or 'none'} (of {pairs})"


def violations(rows: dict[str, Any]) -> tuple[list[tuple[str, str, float]], int]:
    """Return the nested pairs whose larger posterior ends below, and how many pairs there are.

    Below means by more than twice the standard error of the difference, and by 0.1 nats. A pair of
    which one diverged is left out.
    """
    last = max((len(row["elbo"]) for row in rows.values()), default=0) - 1
    ended = {name: row for name, row in rows.items() if len(row["elbo"]) > last >= 0}
    pairs = [pair for pair in NESTED if ended.keys() >= set(pair)]
    found = []
    for small, large in pairs:
        below = ended[small]["elbo"][last] - ended[large]["elbo"][last]
        noise = 2 * math.hypot(*(ended[name]["error"][last] for name in (small, large)))
        if below > max(noise, 0.1):
            found.append((small, large, below))
    return found, len(pairs)


WRITERS = {"nets": cost_table, "convergence": convergence_table}


if __name__ == "__main__":
    main()
