"""What all figures share: axes of no window, colours, labels and legends.

The colours are those of Okabe and Ito (2008), "Color universal design", which people who see red
and green alike can tell apart; their yellow is left out, since it is faint on white.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#666666"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL, DIVERGING = "cividis", "RdBu_r"


def make_axes(ax: Axes | None, width: float = 5.0, height: float = 3.5) -> Axes:
    """Return the axes that were given, or those of a new figure of that size in inches."""
    if ax is None:
        return make_panels(1, 1, width, height)[0]
    figure_of(ax)
    return ax


def make_panels(rows: int, columns: int, width: float, height: float, **options: Any) -> list[Axes]:
    """Return the axes of a new figure, row by row; its size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def figure_of(ax: Axes) -> Figure:
    """Return the figure of axes, or raise a ``ValueError`` if they were taken out of it."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("`ax` must belong to a figure, but was removed from it.")
    return figure


def curve_style(index: int) -> dict[str, Any]:
    """Return colour and line style of a curve: other colours first, then other styles."""
    style = LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style}


def add_labels(ax: Axes, x: str, y: str) -> None:
    """Label the axes where the user has not done so."""
    ax.set_xlabel(ax.get_xlabel() or x)
    ax.set_ylabel(ax.get_ylabel() or y)


def add_legend(ax: Axes) -> None:
    """Add a legend of what has a label: beside the axes if the layout makes room for it there."""
    if not ax.get_legend_handles_labels()[1]:
        return
    if isinstance(figure_of(ax).get_layout_engine(), ConstrainedLayoutEngine):
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0)}
        ax.legend(**beside, borderaxespad=0.0, frameon=False, handlelength=1.6)
    else:
        ax.legend(loc="best", fontsize="small")


def add_colour_bar(ax: Axes, image: Any, label: str) -> None:
    """Add a colour bar beside the axes, with the name and the unit of what the colours mean."""
    figure_of(ax).colorbar(image, ax=ax, label=label)
