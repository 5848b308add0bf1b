"""The figures of pages whose code writes them: runs that code, and draws measured results.

    python docs/scripts/gallery_figures.py                          # all
    python docs/scripts/gallery_figures.py --page two_moons         # one

What a page prints is printed here too. The pages "lora" and "digits" show what `examples/lora.py` and
`make league` have measured, from the files of their results.
"""

import argparse
import contextlib
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import torch

from benchmarks import league_tables
from benchmarks.figure_sources import digest, write_source
from benchmarks.rows import read_rows
from pyro_structvi.plots.figures import figure_of, make_panels

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
Results = Mapping[str, Mapping[str, Sequence[float]]]
FIGURES_OF = {"README": "docs"}  # folders of figures, from that of the page
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?P<raises>\s*^```text\n\w+Error: )?", re.DOTALL | re.MULTILINE
)
LONG_NUMBER = re.compile(r"(\d\.\d)\d+")
TAG = re.compile(r"<[^>]*>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="append", help="a page's name; all when left out")
    parser.add_argument(
        "--folder", type=Path, help="of the figures; that of each page when left out"
    )
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "gallery"
    matplotlib.rcParams["svg.fonttype"] = "none"
    files = ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))
    pages = {page.stem: page for page in files if has_figure(page)}
    for name in options.page or pages:
        page = pages[name]
        print(f"{name}, with local reparameterization where its guide has it")
        folder = (options.folder or page.parent / FIGURES_OF.get(name, "")).resolve()
        run(page, folder)
        if name in MEASURED:
            path = folder / f"{name}.svg"
            draw_results(*MEASURED[name](), path)
            shorten(path)
            write_source(path, source_of_results(name))
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def has_figure(page: Path) -> bool:
    """Whether a page shows a figure that its code writes, or one of measured results belongs to it."""
    return "_build" not in page.parts and (page.stem in MEASURED or ".savefig(" in page.read_text())


def run(page: Path, folder: Path) -> None:
    """Run a page's code in a folder that is then removed, and keep the figures that it shows."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    text = page.read_text()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for block in BLOCK.finditer(text):
            if not block["raises"]:
                exec(compile(block["code"], page, "exec"), namespace)
        for path in (path for path in Path().iterdir() if path.suffix in {".svg", ".png"}):
            if f"{path.name})" not in text:
                continue
            if path.suffix == ".svg":
                shorten(path)
            write_source(path, source_of_code(text))
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
            shutil.copy(path, folder / path.name)


def source_of_code(text: str) -> str:
    """Return a digest of a page's code."""
    return digest([block["code"] for block in BLOCK.finditer(text)])


def source_of_results(name: str) -> str:
    """Return a digest of the results that a page's figure shows."""
    return digest(MEASURED[name]())


def adapters() -> tuple[Results, dict[str, str]]:
    """Return what was measured of posteriors over adapters, by method, and what to show of it."""
    text = (ROOT / "examples" / "lora_results.json").read_text()
    names = {"map": "MAP", "laplace": "Laplace, diagonal", "ensemble": "ensemble of 5"}
    methods = json.loads(text)["methods"]
    return {names.get(name, name): found for name, found in methods.items()}, {
        "nll": "negative log probability (nats)",
        "calibration_error": "calibration error",
    }


def digits() -> tuple[Results, dict[str, str]]:
    """Return the league's distances to NUTS on digits, by posterior, and what to show of them."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rows = read_rows(ROOT / "benchmarks" / "results" / "league.csv", league_tables.HEADER)
    for problem, method, _, quantity, value in league_tables.without_peers(rows):
        if problem == "digits" and method != league_tables.PRIOR:
            found[league_tables.label(method)][quantity].append(float(value))
    return found, {
        "turned: total variation": "turned digits: total variation",
        "test: total variation": "test digits: total variation",
        "turned: log ratio of deviations": "turned digits: log ratio of deviations",
    }


def draw_results(results: Results, shown: Mapping[str, str], path: Path) -> None:
    """Draw means with standard errors, a panel for each quantity; the first one orders the rows."""
    first = next(iter(shown))
    names = sorted(results, key=lambda name: fmean(results[name][first]), reverse=True)
    panels = make_panels(1, len(shown), 2 + 3.3 * len(shown), 0.8 + 0.25 * len(names), sharey=True)
    for ax, (quantity, label) in zip(panels, shown.items(), strict=True):
        for place, name in enumerate(names):
            values = results[name][quantity]
            error = stdev(values) / len(values) ** 0.5 if values[1:] else None
            ax.errorbar(fmean(values), place, xerr=error, fmt="o", color="C0", markersize=4)
        ax.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
        ax.grid(axis="y", linewidth=0.4)
    figure_of(panels[0]).savefig(path)


MEASURED: dict[str, Callable[[], tuple[Results, dict[str, str]]]] = {
    "lora": adapters,
    "digits": digits,
}


def shorten(path: Path) -> None:
    """Round the coordinates of a figure, not its texts."""
    path.write_text(TAG.sub(lambda tag: LONG_NUMBER.sub(r"\1", tag[0]), path.read_text()))


if __name__ == "__main__":
    main()
