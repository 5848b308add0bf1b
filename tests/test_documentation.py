"""The code in the README, in the pages of ``docs/`` and in docstrings runs, and prints what is shown.

On a page, a block of output (``text``) right after a block of Python is what that block prints. If it
starts with the name of an error or a warning, the code must raise that, with that message.
"""

import contextlib
import doctest
import importlib
import io
import operator
import pkgutil
import re
import runpy
import sys
import tomllib
import warnings
from decimal import Decimal
from pathlib import Path

import pytest
import torch

import pyro_structvi

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
MODULES = [
    "pyro_structvi",
    *(module.name for module in pkgutil.walk_packages(pyro_structvi.__path__, "pyro_structvi.")),
]
MODULES.remove("pyro_structvi.transformers")  # its examples run with the nets of other libraries
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
DECIMAL = re.compile(r"\d+\.\d+")
ANNOUNCED = re.compile(r"(?P<name>\w+(?:Error|Warning)): (?P<message>.+)")
LINK = re.compile(r"(?<!`)\]\((?P<path>[^)\s:#]*)(?:#(?P<anchor>[^)\s]+))?\)")
HEADING = re.compile(r"^#{1,3} (?P<title>.+)$", re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
TOCTREE = re.compile(r"^```{toctree}\n(?P<entries>.*?)^```", re.DOTALL | re.MULTILINE)
LONGEST_LEVEL = 9  # entries on a level of the navigation
# Pages that train or import for some seconds; a sample of them runs in CI.
SLOW = {
    "docs/start/getting_started.md",
    "docs/how_to/deep_nets.md",
    "docs/how_to/deploy.md",
    "docs/how_to/many_devices.md",
    "docs/how_to/is_it_any_good.md",
    "docs/how_to/lora.md",
    "docs/how_to/checkpoints.md",
    "docs/how_to/training.md",
    "docs/how_to/which_weights.md",
    "docs/develop/write_your_own_family.md",
    "docs/how_to/reference_posteriors.md",
    "docs/how_to/one_pass.md",
    "docs/how_to/tables.md",
    "docs/how_to/priors_and_models.md",
    "docs/how_to/real_nets.md",
    "docs/how_to/speed.md",
    *(f"docs/guides/{name}.md" for name in ("subnetwork", "mixtures", "points", "rank_one")),
    *(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/gallery/*.md")),
    "pyro_structvi.reference.sampling",
    "pyro_structvi.reference.mclmc",
    "pyro_structvi.testing.guides",
    "pyro_structvi.reference.numpyro_model",
}


@pytest.fixture(autouse=True)
def float32_by_default(fresh_state):
    """Run what users run in the dtype that they have; the suite's own is float64."""
    torch.set_default_dtype(torch.float32)


def with_marks(name, value):
    return pytest.param(value, id=name, marks=[pytest.mark.slow] * (name in SLOW))


PAGES_WITH_CODE = [
    with_marks(page.relative_to(ROOT).as_posix(), page)
    for page in PAGES
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_page_runs_and_prints_what_it_shows(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        lines_above = text[: block.start("code")].count("\n")
        code = compile("\n" * lines_above + block["code"], page, "exec")
        run_block(code, namespace, block["output"])


def run_block(code, namespace, expected):
    """Run one block of a page and compare what it prints, warns of or raises with what is shown."""
    announced = ANNOUNCED.fullmatch(squeeze(expected or ""))
    printed, raised = io.StringIO(), []
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(
            record=bool(announced), action="always" if announced else None
        ) as warned,
    ):
        try:
            exec(code, namespace)
        except Exception as error:
            if announced is None:
                raise
            raised = [error]
    if announced:
        messages = [*raised, *(warning.message for warning in warned)]
        assert [type(message).__name__ for message in messages] == [announced["name"]]
        assert squeeze(str(messages[0])).startswith(announced["message"])
    elif expected is not None:
        assert_shown(printed.getvalue(), expected)


def assert_shown(printed, expected):
    """Compare texts; decimals may differ by one in the last digit, as rounding does by processor."""
    assert DECIMAL.sub("#", squeeze(printed)) == DECIMAL.sub("#", squeeze(expected))
    for got, shown in zip(DECIMAL.findall(printed), DECIMAL.findall(expected), strict=True):
        unit = Decimal(shown).as_tuple().exponent
        assert Decimal(got).as_tuple().exponent == unit
        assert abs(Decimal(got) - Decimal(shown)) <= Decimal(1).scaleb(unit)


def test_shown_numbers_may_differ_by_one_in_the_last_digit():
    assert_shown("a 0.54, b", "a 0.55, b")
    for printed in ("a 0.57, b", "a 0.5400, b", "c 0.55, b"):
        with pytest.raises(AssertionError):
            assert_shown(printed, "a 0.55, b")


def squeeze(text):
    return " ".join(text.split())


def test_code_on_pages_is_narrow():
    """So that it needs no scrolling; what it prints is as wide as it is."""
    settings = tomllib.loads((ROOT / "docs" / "ruff.toml").read_text())
    left_out = settings.get("format", {}).get("exclude", [])
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        if not any(page.match(f"docs/{glob}") for glob in left_out)
        for block in re.finditer(r"^```py(?:thon)?\n(.*?)^```", page.read_text(), re.S | re.M)
        for line in block[1].splitlines()
        if len(line) > settings["line-length"]
    ]
    assert not wide, "\n".join(wide)


def anchors_of(page):
    """Return the names by which links find the headings of a page, as GitHub and MyST make them."""
    titles = [heading["title"] for heading in HEADING.finditer(FENCED.sub("", page.read_text()))]
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def test_links_between_files_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    broken = []
    for page in pages:
        for link in LINK.finditer(FENCED.sub("", page.read_text())):
            target, anchor = (page.parent / link["path"]) if link["path"] else page, link["anchor"]
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link[0][1:]}")
    assert not broken, "\n".join(broken)


def test_gotchas_are_in_the_order_of_their_messages():
    text = FENCED.sub("", (ROOT / "docs/start/gotchas.md").read_text())
    listed = text.split("## Without a message")[0].replace("`", "").lower()
    titles = re.findall(r"^### (.+)$", listed, re.MULTILINE)
    assert titles == sorted(titles)


def test_every_page_is_in_the_navigation_and_levels_are_short():
    folder, reached = ROOT / "docs", ["index"]
    for name in reached:
        page = folder / f"{name}.md"  # notebooks have no pages below them
        for tree in TOCTREE.finditer(page.read_text() if page.exists() else ""):
            lines = [line for line in tree["entries"].splitlines() if line[:1] not in ("", ":")]
            assert len(lines) <= LONGEST_LEVEL, name
            reached += [(Path(name).parent / line).as_posix() for line in lines]
    files = [*folder.rglob("*.md"), *folder.rglob("*.ipynb")]
    pages = {page.relative_to(folder).with_suffix("").as_posix() for page in files}
    built = {name for name in pages if not name.startswith(("_build", "jupyter_execute"))}
    assert sorted(reached) == sorted(built)


@pytest.mark.slow
def test_sampled_outputs_have_gradients_of_less_variance(monkeypatch, capsys, tmp_path):
    script, figure = ROOT / "docs/scripts/gradient_variance.py", tmp_path / "figure.png"
    arguments = ["--net", "dense", "--gradients", "30", "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", [script.name, *arguments])
    runpy.run_path(str(script), run_name="__main__")
    rows = capsys.readouterr().out.splitlines()[2:]
    gains = sorted(float(gain) for row in rows for gain in re.findall(r"\( *([\d.]+)\)", row))
    assert gains[:6] == [1.0] * 6, "sampled weights are the measure"
    assert len(gains) == 12
    assert all(gain > 1 for gain in gains[6:])


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/guides/*.md")), ids=lambda page: page.stem)
def test_code_that_a_page_names_is_where_it_says(page):
    text = " ".join(page.read_text().split())
    named = re.findall(r"Code: `([\w.]+)` in `([\w/]+)\.py`", text)
    assert named
    for name, file in named:
        module = importlib.import_module(f"pyro_structvi.{file.replace('/', '.')}")
        found = operator.attrgetter(name)(module)
        owner = getattr(module, name.split(".")[0])
        assert owner.__module__ == module.__name__, f"{name} is of another file"
        assert found is not None


@pytest.mark.parametrize("name", [with_marks(name, name) for name in MODULES])
def test_docstring_examples(name):
    module = importlib.import_module(name)
    report = io.StringIO()
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=report.write)
    assert not runner.failures, report.getvalue()
