"""Common parts of figures: axes without a window, colours, legends, checked arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray
from torch import Tensor

from pyro_structvi._checks import brief, shape_text

# Values of figures; a list of numbers has one dimension.
Values = Tensor | np.ndarray | Sequence[float]
Matrix = Tensor | np.ndarray
Array = NDArray[np.float64]

# The palette of Okabe and Ito (2008), "Color universal design", without its faint yellow.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#666666"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
# Styles of curves, colours first.
CURVES = [
    {"color": each, "linestyle": style} for style in ("-", "--", "-.", ":") for each in COLOURS
]
SEQUENTIAL, DIVERGING = "cividis", "RdBu_r"


def make_axes(ax: Axes | None, width: float = 5.0, height: float = 3.5) -> Axes:
    """Return the given axes, or the axes of a new figure of this size in inches."""
    if ax is None:
        return make_panels(1, 1, width, height)[0]
    figure_of(ax)
    return ax


def make_panels(rows: int, columns: int, width: float, height: float, **options: Any) -> list[Axes]:
    """Return the axes of a new figure, row by row, with its size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def figure_of(ax: Axes) -> Figure:
    """Return the figure of axes, or raise a ``ValueError`` if they were removed from it."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("`ax` must belong to a figure, but was removed from it.")
    return figure


def next_style(ax: Axes, taken: Sequence[str] = ()) -> dict[str, Any]:
    """Return the first style that the fewest lines of the axes have, without ``taken`` colours."""
    used = [{"color": line.get_color(), "linestyle": line.get_linestyle()} for line in ax.lines]
    return min((each for each in CURVES if each["color"] not in taken), key=used.count)


def draw_diagonal(ax: Axes, label: str) -> None:
    """Draw the diagonal of shares, with a label once."""
    is_labelled = label in ax.get_legend_handles_labels()[1]
    style: dict[str, Any] = {"color": GREY, "linewidth": 1, "linestyle": "--"}
    ax.plot([0, 1], [0, 1], **style, label=None if is_labelled else label)


def add_labels(ax: Axes, x: str, y: str) -> None:
    """Label the axes unless they have labels."""
    ax.set_xlabel(ax.get_xlabel() or x)
    ax.set_ylabel(ax.get_ylabel() or y)


def add_legend(ax: Axes) -> None:
    """Add a legend if there are labels, next to the axes in a constrained layout."""
    if not ax.get_legend_handles_labels()[1]:
        return
    if isinstance(figure_of(ax).get_layout_engine(), ConstrainedLayoutEngine):
        outside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0)}
        ax.legend(**outside, borderaxespad=0.0, frameon=False, handlelength=1.6)
    else:
        ax.legend(loc="best", fontsize="small")


def real_array(name: str, values: Values, dim: int = 1) -> Array:
    """Return finite real numbers in ``dim`` dimensions as a float64 array, or raise a ``ValueError``."""
    if isinstance(values, Tensor):
        values = values.detach()
        readable = not (values.is_complex() or values.is_meta or values.dtype == torch.bool)
        array = values.cpu().double().numpy() if readable else np.array(None)
    else:
        if np.ma.is_masked(values):
            raise ValueError(
                f"`{name}` must have no masked entries, which would be drawn. Leave them out, as in "
                f"`{name}[~{name}.mask]`."
            )
        array = np.asarray(values)
    if dim == 1 and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "iuf":
        raise ValueError(f"`{name}` must hold real numbers, but got {brief(values)}.")
    if array.ndim != dim or not array.size:
        raise ValueError(
            f"`{name}` must hold at least one number, in {dim} dimension{'s' * (dim > 1)}, but got the "
            f"shape {shape_text(array.shape)}."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be finite everywhere, but is not.")
    return array.astype(np.float64)


def same_length(arguments: Mapping[str, Values | None]) -> dict[str, Array]:
    """Return those arguments that are not None as arrays of one length, or raise a ``ValueError``."""
    given = {name: values for name, values in arguments.items() if values is not None}
    arrays = {name: real_array(name, values) for name, values in given.items()}
    first = next(iter(arrays))
    for name, array in arrays.items():
        if len(array) != len(arrays[first]):
            raise ValueError(
                f"`{first}` and `{name}` must have as many values, but got {len(arrays[first])} and "
                f"{len(array)}."
            )
    return arrays
