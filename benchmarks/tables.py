"""Tables of committed results: ``python -m benchmarks.tables`` writes them into the documentation."""

import argparse
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import league_tables, paper_tables, uci_priors_table, uci_tables
from benchmarks.deep_nets_table import DEEP_NETS, deep_nets_table
from benchmarks.markdown import markdown
from benchmarks.optimization_table import OPTIMIZATION, optimization_table
from benchmarks.rows import Row, read_rows

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
        ROOT / "docs" / name
        for name in (
            "benchmarks.md",
            "deep_nets.md",
            "gallery/bayesian_optimization.md",
            "league.md",
            "one_pass.md",
            "sampling.md",
            "tables.md",
            "training.md",
            "uci.md",
        )
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
        return deep_nets_table(read_rows(path, header))
    if header == OPTIMIZATION:
        return optimization_table(read_rows(path, header))
    if header == uci_tables.DECOMPOSED:
        return markdown(header, [list(row) for row in read_rows(path, header)])
    if header == uci_tables.ESTIMATORS:
        return uci_tables.estimators_table(read_rows(path, header))
    if header == uci_tables.SAMPLED:
        guides = read_rows(path.with_name("uci.csv"), uci_tables.HEADER)
        return uci_tables.sampling_table(read_rows(path, header), guides)
    if header == paper_tables.HEADER:
        return paper_tables.paper_tables(path)
    kind, write = {
        uci_priors_table.HEADER: (uci_priors_table, uci_priors_table.priors_tables),
        uci_tables.HEADER: (uci_tables, uci_tables.uci_tables),
        league_tables.HEADER: (league_tables, guides_of_the_league),
    }[header]
    return write(read_rows(path, kind.HEADER))


def guides_of_the_league(rows: Iterable[Row]) -> str:
    """Return the tables of the league without other packages, see ``benchmarks/summary.py``."""
    return league_tables.league_tables(league_tables.without_peers(rows))


def machine_line(results: dict[str, Any]) -> str:
    machine = results["machine"]
    text = f"torch {machine['torch']}, Pyro {machine['pyro']}, {machine['device']}"
    return f"{text}, {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"


# ---- of nets -------------------------------------------------------------------------------------


def all_nets(results: dict[str, Any]) -> str:
    tables = [f"### {net['title']}\n\n{net_table(net)}" for net in results["nets"].values()]
    line = f"{machine_line(results)}; predictions of S = {results['samples']} draws."
    return "\n\n".join([line, *tables])


def net_table(net: dict[str, Any]) -> str:
    """Return the markdown table of one net: ratios to the first row, which is given in words."""
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


def convergence_tables(results: dict[str, Any]) -> str:
    """Return a table for each problem, the ELBO after numbers of steps, and the pairs out of order."""
    parts = [f"{machine_line(results)}; ELBOs of {results['particles']} particles."]
    head = ["guide", "recipe", *(f"{steps:,} steps" for steps in results["steps"]), "seconds"]
    for problem in results["convergence"].values():
        recipes = problem["recipes"]
        rows = [
            [guide, recipe, *training_cells(recipes[recipe][guide], len(results["steps"]))]
            for guide in dict.fromkeys(guide for rows in recipes.values() for guide in rows)
            for recipe in recipes
            if guide in recipes[recipe]
        ]
        known = problem["evidence"]
        line = "" if known is None else f"\n\nThe log evidence is {known:.2f}."
        lines = "".join(
            f"\n- {recipe}: {out_of_order(own)}"
            for recipe, own in recipes.items()
            if violations(own)[1]
        )
        pairs = f"Nested pairs whose larger posterior ends lower:\n{lines}"
        parts.append(f"### {problem['title']}\n\n{markdown(head, rows)}{line}\n\n{pairs}")
    return "\n\n".join(parts)


def training_cells(row: dict[str, list[float]], count: int) -> list[str]:
    cells = [f"{a:.1f} ± {b:.1f}" for a, b in zip(row["elbo"], row["error"], strict=True)]
    cells += ["diverged"] * (count - len(cells))
    return [*cells, f"{row['seconds'][-1]:.1f}" if row["seconds"] else ""]


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


WRITERS = {"sweeps": scaling_tables, "nets": all_nets, "convergence": convergence_tables}


if __name__ == "__main__":
    main()
