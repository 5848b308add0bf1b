"""One HTML page of sections with texts, tables and figures, which needs nothing from elsewhere."""

import base64
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from string import Template
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from pyro_structvi._checks import shape_text
from pyro_structvi.plots.figures import figure_of, make_panels

LONG = 20  # rows of a table, beyond which it is folded
_END_OF_PART = re.compile(r"(?<=[./_])")  # of a dotted name, which may be broken there


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head.

    Attributes:
        title: What the rows are.
        head: One name a column.
        rows: Their cells: texts, numbers, shapes, or None for an empty one.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Picture:
    """A figure in the format SVG.

    Attributes:
        caption: What it shows, in a sentence.
        svg: The file.
        is_wide: Whether it takes the width of the page.
    """

    caption: str
    svg: bytes
    is_wide: bool = False


Part = str | Table | Picture


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: Its heading.
        reading: How to read it, in a sentence or two.
        parts: What it shows.
    """

    title: str
    reading: str
    parts: Sequence[Part]


def make_ax(width: float = 4.6, height: float = 3.2) -> Axes:
    """Return axes, in inches so small that their texts can be read on a phone."""
    return make_panels(1, 1, width, height)[0]


def picture(caption: str, ax: Axes, is_wide: bool = False) -> Picture:
    """Return the figure of axes, the same file for the same figure."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report"}):
        figure_of(ax).savefig(file, format="svg", metadata={"Date": None})
    return Picture(caption, file.getvalue(), is_wide)


def page(title: str, subtitle: str, sections: Iterable[Section]) -> str:
    """Return the page as HTML; all texts are escaped."""
    sections = [*sections]
    links = (f'<a href="#part-{n}">{escape(own.title)}</a>' for n, own in enumerate(sections, 1))
    return _PAGE.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=_STYLE,
        links="\n".join(links),
        sections="\n".join(_section(n, own) for n, own in enumerate(sections, 1)),
    )


def cell_text(value: Any) -> str:
    """Return a cell as it is printed: four digits of a number, none after the point of a large one."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return shape_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def _section(number: int, section: Section) -> str:
    lines = [f'<section id="part-{number}">', f"<h2>{escape(section.title)}</h2>"]
    lines.append(f'<p class="reading">{escape(section.reading)}</p>')
    for kind, group in groupby(section.parts, type):
        parts = [_HTML_OF[kind](part) for part in group]
        lines += ['<div class="figures">', *parts, "</div>"] if kind is Picture else parts
    return "\n".join([*lines, "</section>"])


def _text(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(table: Table) -> str:
    columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.head)
    first = [next((each for each in own if each is not None), None) for own in columns]
    head = "".join(
        f"<th{_class_of(value)}>{escape(name)}</th>"
        for name, value in zip(table.head, first, strict=True)
    )
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    body = f'<div class="wide"><table>{inside}</table></div>'
    if len(table.rows) > LONG:
        title = f"{escape(table.title)} ({len(table.rows)} rows)"
        return f"<details><summary>{title}</summary>\n{body}</details>"
    return f"<h3>{escape(table.title)}</h3>\n{body}"


def _cell(value: Any) -> str:
    text = escape(cell_text(value))
    if isinstance(value, str):
        text = _END_OF_PART.sub("<wbr>", text)
    return f"<td{_class_of(value)}>{text}</td>"


def _class_of(value: Any) -> str:
    return ' class="number"' if isinstance(value, (int, float)) else ""


def _picture(picture: Picture) -> str:
    data, caption = base64.b64encode(picture.svg).decode(), escape(picture.caption)
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{caption}">'
    kind = ' class="wide"' if picture.is_wide else ""
    return f"<figure{kind}>{image}<figcaption>{caption}</figcaption></figure>"


_HTML_OF: dict[Any, Any] = {str: _text, Table: _table, Picture: _picture}

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --quiet: #59636e; --ground: #ffffff;
  --line: #d1d9e0; --strip: #f6f8fa; --link: #0a5bb5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --quiet: #9aa5b1; --ground: #0d1117;
  --line: #30363d; --strip: #161b22; --link: #6cb2ff; } img { filter: brightness(0.92); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--text); background: var(--ground);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; border-bottom: 1px solid var(--line);
  padding-bottom: 0.3rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.4rem; }
p { max-width: 46rem; margin: 0.5rem 0; }
.reading, header p, figcaption { color: var(--quiet); }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin: 1rem 0; }
a { color: var(--link); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.7rem; text-align: left; border-bottom: 1px solid var(--line); }
@media (max-width: 40rem) { th, td { padding: 0.3rem 0.4rem; }
  td:not(.number) { min-width: 4.5rem; } }
.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
thead th { background: var(--strip); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; margin: 1rem 0; align-items: start; }
figure { margin: 0; max-width: 36rem; }
figure.wide { grid-column: 1 / -1; max-width: 56rem; }
figure.wide img { min-width: 34rem; }
img { display: block; width: 100%; height: auto; background: #ffffff; border-radius: 6px;
  border: 1px solid var(--line); padding: 0.5rem; }
figcaption { font-size: 0.85rem; margin-top: 0.3rem; }
details { margin: 0.8rem 0; }
summary { cursor: pointer; }
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p>$subtitle</p>
</header>
<nav>
$links
</nav>
<main>
$sections
</main>
</body>
</html>
""")
