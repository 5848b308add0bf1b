"""The pictures of the documentation: each is drawn by a script, of the guide that its page is about."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.choices import CHOICES

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OF_RESULTS = {"start/choosing.svg"} | {
    f"evidence/{name}.svg" for name in ("league", "scaling", "costs", "convergence")
}
OF_SCRIPTS = {
    "bands.svg",
    "how_to/is_it_any_good_classes.svg",
    "understand/gradient_variance.svg",
}


@pytest.fixture(scope="module")
def pictures():
    sys.path.insert(0, str(ROOT))
    return runpy.run_path(str(DOCS / "scripts/guide_pictures.py"))


def test_every_picture_is_drawn_by_one_command(pictures):
    named = {
        f"guides/{own.page}_{part}.svg"
        for own in pictures["PICTURES"].values()
        for part in ("covariance", "regression")
        if part == "regression" or own.has_covariance
    }
    saved = re.compile(r'savefig\(\s*"(\w+\.(?:svg|png))"')
    of_pages = {
        (page.parent / name).relative_to(DOCS).as_posix()
        for page in DOCS.glob("**/*.md")
        for name in saved.findall(page.read_text())
        if f"]({name})" in page.read_text()
    }
    measured = {"gallery/digits.svg", "how_to/lora.svg", "gallery/regression.png"}
    shown = {
        path.relative_to(DOCS).as_posix()
        for kind in ("svg", "png")
        for path in DOCS.rglob(f"*.{kind}")
        if not {"_build", "_static", "jupyter_execute"} & {*path.parts}
    }
    assert shown == named | of_pages | measured | OF_RESULTS | OF_SCRIPTS
    command = re.search(
        r"^figures:.*?\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    scripts = "guide_pictures", "gallery_figures", "bands", "is_it_any_good", "gradient_variance"
    for script in scripts:
        assert f"docs/scripts/{script}.py" in command[0]
    for name in (*OF_RESULTS - {"start/choosing.svg"}, "benchmarks.summary"):
        assert name in command[0]


OPENED_WITH = [choice for choice in CHOICES if choice.guide != "MAPGuide"]  # the ensemble is there


@pytest.mark.parametrize("choice", OPENED_WITH, ids=lambda choice: choice.guide)
def test_a_page_opens_with_the_guide_of_the_tables(choice, pictures):
    model, x, y = pictures["cosine_model"]()
    page = Path(choice.page).stem
    picture = next(own for own in pictures["PICTURES"].values() if own.page == page)
    drawn, named = picture.make(model), choice.make(model)
    for guide in (drawn, named):
        guide.initialize(x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype()))
    assert str(drawn) == str(named)
