"""Tables of committed results: ``python -m benchmarks.tables`` writes them into docs/benchmarks.md."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
GENERATED = re.compile(r"(<!-- from (?P<file>\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    options.output.write_text(render(PAGE.read_text()))
    print(options.output.read_text())


def write_results(results: dict[str, Any], path: Path) -> None:
    """Write a JSON file, with what is innermost on one line."""
    text = json.dumps(results, indent=1)
    for inner in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(inner, lambda match: " ".join(match[0].split()), text)
    path.write_text(text + "\n")


def render(text: str) -> str:
    """Put the tables of the files that a page names in place of those it has."""

    def replace(match: re.Match[str]) -> str:
        results = json.loads((ROOT / match["file"]).read_text())
        write = scaling_tables if "sweeps" in results else all_nets
        return f"{match[1]}\n{write(results)}\n\n{match[3]}"

    return GENERATED.sub(replace, text)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


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
            memory = three_digits(own["bytes"] / base[task]["bytes"])
            row += [middle, f"{low} - {high}", memory]
        rows.append(row)
    head = ["", *("step", "quartiles", "memory"), *("prediction", "quartiles", "memory")]
    itself = "; ".join(
        f"{task} {three_digits(own['milliseconds'][1])} ms, "
        f"{three_digits(own['bytes'] / 2**20)} MiB"
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


if __name__ == "__main__":
    main()
