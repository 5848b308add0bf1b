"""The pictures of the documentation: each is drawn by a script, of the guide that its page is about.

A figure carries its source: a digest of results (`make figures FIGURES=results` draws it anew), a
digest of its page's code (`docs/scripts/gallery_figures.py --page NAME`; changes of the package do not
show), or the ELBO of a short training (`docs/scripts/guide_pictures.py --guide NAME`,
`docs/scripts/bands.py`). Without a source are `gallery/regression.png`, which `guide_pictures.py` draws
with all pictures, and figures of `docs/scripts/is_it_any_good.py` and of `gradient_variance.py` there.
"""

import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Annotation

from benchmarks.choices import CHOICES
from benchmarks.distance_over_cost import plot_distance_over_cost
from benchmarks.figure_sources import digest, metadata, read_source, write_source
from benchmarks.rows import read_rows

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OF_RESULTS = {
    "start/choosing.svg": "league.csv",
    "evidence/league.svg": "league.csv",
    "evidence/scaling.svg": "scaling.json",
    "evidence/costs.svg": "bench.json",
    "evidence/convergence.svg": "convergence.json",
    "gallery/active_learning.svg": "active_learning.csv",
}
MEASURED = {"digits": "gallery/digits.svg", "lora": "how_to/lora.svg"}
OF_SCRIPTS = {
    "bands.svg",
    "gallery/regression.png",
    "how_to/is_it_any_good_classes.svg",
    "understand/gradient_variance.svg",
}


SAVED = re.compile(r'savefig\(\s*"(\w+\.(?:svg|png))"')
BY_CODE = {
    (page.parent / shown).relative_to(ROOT / "docs").as_posix(): page
    for page in (ROOT / "README.md", *DOCS.glob("**/*.md"))
    for name in SAVED.findall(page.read_text())
    for shown in re.findall(rf"\]\(((?:docs/)?{name})\)", page.read_text())
}


def run_script(name):
    sys.path.insert(0, str(ROOT))
    return runpy.run_path(str(DOCS / f"scripts/{name}.py"))


@pytest.fixture(scope="module")
def pictures():
    return run_script("guide_pictures")


@pytest.fixture(scope="module")
def gallery():
    return run_script("gallery_figures")


@pytest.fixture
def float32_by_default(fresh_state):
    torch.set_default_dtype(torch.float32)


def test_every_picture_is_drawn_by_one_command(pictures):
    named = {
        f"guides/{own.page}_{part}.svg"
        for own in pictures["PICTURES"].values()
        for part in ("covariance", "regression")
        if part == "regression" or own.has_covariance
    }
    shown = {
        path.relative_to(DOCS).as_posix()
        for kind in ("svg", "png")
        for path in DOCS.rglob(f"*.{kind}")
        if not {"_build", "_static", "jupyter_execute"} & {*path.parts}
    }
    drawn = {*MEASURED.values(), *OF_RESULTS, *BY_CODE}
    assert shown == named | drawn | OF_SCRIPTS
    command = re.search(
        r"^figures:.*?\n\n", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    scripts = "guide_pictures", "gallery_figures", "bands", "is_it_any_good", "gradient_variance"
    for script in scripts:
        assert f"docs/scripts/{script}.py" in command[0]
    for name in (*OF_RESULTS.keys() - {"start/choosing.svg"}, "benchmarks.summary"):
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


@pytest.mark.parametrize("figure", OF_RESULTS)
def test_a_figure_shows_the_results_that_are_committed(figure):
    path = ROOT / "benchmarks" / "results" / OF_RESULTS[figure]
    header = tuple(path.read_text().splitlines()[0].split(","))
    is_table = path.suffix == ".csv"
    results = read_rows(path, header) if is_table else json.loads(path.read_text())
    assert read_source(DOCS / figure) == digest(results), "make figures FIGURES=results"


@pytest.mark.parametrize("page", MEASURED)
def test_a_figure_of_a_page_shows_the_results_that_are_committed(page, gallery):
    source = gallery["source_of_results"](page)
    assert read_source(DOCS / MEASURED[page]) == source, "make figures FIGURES=results"


@pytest.mark.parametrize("figure", BY_CODE)
def test_a_figure_is_drawn_by_the_code_of_its_page(figure, gallery):
    page = BY_CODE[figure]
    command = f"python docs/scripts/gallery_figures.py --page {page.stem}"
    assert read_source(DOCS / figure) == gallery["source_of_code"](page.read_text()), command


def elbos(source):
    return [float(value) for value in re.findall(r"ELBO (\S+) after", source)]


@pytest.mark.slow
def test_pictures_of_guides_are_of_todays_defaults(pictures, float32_by_default):
    """The ELBO of a short training shows changes of a guide's defaults, of `fit` and of priors."""
    for title, picture in pictures["PICTURES"].items():
        expected = pytest.approx(elbos(pictures["source_of"](picture)), rel=5e-4)
        for part in ("covariance", "regression"):
            if part == "regression" or picture.has_covariance:
                found = elbos(read_source(DOCS / f"guides/{picture.page}_{part}.svg") or "")
                command = f'python docs/scripts/guide_pictures.py --guide "{title}"'
                assert found == expected, command


@pytest.mark.slow
def test_the_picture_of_the_front_page_is_drawn_with_todays_defaults(float32_by_default):
    found = elbos(read_source(DOCS / "bands.svg") or "")
    expected = elbos(run_script("bands")["source_of_bands"]())
    assert len(expected) > 1
    assert found == pytest.approx(expected, rel=5e-4), "python docs/scripts/bands.py"


@pytest.mark.parametrize("name", ["figure.svg", "figure.png"])
def test_a_figure_carries_its_source(name, tmp_path):
    from matplotlib.figure import Figure

    path = tmp_path / name
    figure = Figure()
    figure.subplots().plot([0, 1])
    figure.savefig(path)
    assert read_source(path) is None
    write_source(path, "digest of results")
    assert read_source(path) == "digest of results"
    figure.savefig(path, metadata=metadata(path, "another"))
    assert read_source(path) == ("another" if path.suffix == ".svg" else None)


# ---- posteriors by cost and distance -------------------------------------------------------------


def shared(a, b):
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0) * max(height, 0)


def test_points_error_bars_and_lines():
    rows = {"a": (1.0, 0.5), "b": (3.0, 0.2)}
    ax = plot_distance_over_cost(rows, errors={"b": 0.1}, floor=0.1, ceiling=0.9, unit="min")
    points, _, (bars,) = ax.containers[0]
    np.testing.assert_array_equal(points.get_xydata(), [*rows.values()])
    np.testing.assert_allclose(bars.get_segments(), [[[1, 0.5], [1, 0.5]], [[3, 0.1], [3, 0.3]]])
    assert [line.get_ydata() for line in ax.lines[1:]] == [[0.1, 0.1], [0.9, 0.9]]
    texts = {text.get_text(): text.xy for text in ax.texts}
    assert texts == {"floor": (1, 0.1), "ceiling": (1, 0.9), **rows}
    assert ax.get_xlabel() == "cost of training (min)"


def test_names_do_not_cover_each_other_or_points():
    rng = np.random.default_rng(0)
    places = zip(np.exp(rng.normal(3, 0.2, 20)), 0.5 + 0.1 * rng.normal(size=20), strict=True)
    rows = {f"posterior with number {index}": place for index, place in enumerate(places)}
    ax = plot_distance_over_cost(rows)
    ax.figure.draw_without_rendering()
    # Of an annotation with a line, the extent of the text alone.
    boxes = [super(Annotation, text).get_window_extent() for text in ax.texts]
    assert len(boxes) == 20
    assert max(shared(a, b) for a, b in itertools.combinations(boxes, 2)) == 0
    places = ax.transData.transform(ax.lines[0].get_xydata())
    assert not [box for box in boxes for x, y in places if box.contains(x, y)]
    inside = ax.get_window_extent()
    assert all(shared(box, inside) == pytest.approx(box.width * box.height) for box in boxes)
