"""Names beside points, placed one after the other where they cover least of what is there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from pyro_structvi.plots.figures import GREY, Array, figure_of

# Distances of a name from its point, in points (1/72 inch); beyond `NEAR` a line leads to it.
DISTANCES = (5.0, 8.0, 13.0, 19.0, 26.0, 34.0, 44.0)
NEAR = 8.0
DIRECTIONS = (
    *((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)),
    *((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)),
    *((1.0, 0.4), (1.0, -0.4), (-1.0, 0.4), (-1.0, -0.4)),
    *((0.4, 1.0), (0.4, -1.0), (-0.4, 1.0), (-0.4, -1.0)),
)
SIDES = {-1: ("right", "top"), 0: ("center", "center"), 1: ("left", "bottom")}
# Half the size of what is kept free about points, lines and names, in points.
POINT, LINE, NAME = 4.0, 2.0, 1.0
# What a point of distance costs, in covered square points.
FAR = 0.5
SWEEPS = 4


@dataclass(frozen=True)
class Place:
    """Where a name can stand.

    Attributes:
        distance: Distance from its point, in points.
        direction: The horizontal and vertical way from its point, of any length.
        boxes: What it takes, in pixels (left, bottom, right, top): itself, and the line that leads
            to it.
    """

    distance: float
    direction: tuple[float, float]
    boxes: Array

    @property
    def sides(self) -> tuple[int, int]:
        """On which side of its point it stands, horizontally and vertically: -1, 0 or 1."""
        return round(self.direction[0]), round(self.direction[1])

    @property
    def offset(self) -> Array:
        """The way from the point, in points."""
        return self.distance * np.asarray(self.direction) / np.linalg.norm(self.direction)


def place_labels(ax: Axes, names: Sequence[str], x: Array, y: Array, reach: Array) -> None:
    """Write a name beside each point, for the limits and the size that the axes have now.

    Names are placed one by one, from left to right, where they cover least of the other names, the
    points, the error bars and what is outside of the axes, and are near. Then each is placed again,
    beside all the others.

    Args:
        ax: The axes, with the points drawn.
        names: The names.
        x: Horizontal places of the points.
        y: Vertical places of the points.
        reach: How far the points' error bars reach up and down.
    """
    figure = figure_of(ax)
    figure.draw_without_rendering()  # so that limits and layout are the final ones
    pixels = figure.dpi / 72
    low = _pixels(ax, x, np.maximum(y - reach, min(ax.get_ylim())))
    high = _pixels(ax, x, y + reach)
    points = np.concatenate([low - POINT * pixels, high + POINT * pixels], 1)
    inside = np.asarray(ax.get_window_extent().extents)
    sizes = [_size(ax, name) for name in names]
    centres = _pixels(ax, x, y)
    choices = [_places(*pair, pixels) for pair in zip(centres, sizes, strict=True)]
    chosen: dict[int, Place] = {}
    for _ in range(SWEEPS):
        for index in np.argsort(x, kind="stable"):
            others = [place.boxes for key, place in chosen.items() if key != index]
            taken = np.concatenate([np.delete(points, index, 0), *others])
            costs = [_cost(place, points[index], taken, inside, pixels) for place in choices[index]]
            chosen[int(index)] = choices[index][int(np.argmin(costs))]
    for index, place in chosen.items():
        _write(ax, names[index], (float(x[index]), float(y[index])), place)


def _pixels(ax: Axes, x: Array, y: Array) -> Array:
    return np.asarray(ax.transData.transform(np.column_stack([x, y])))


def _size(ax: Axes, name: str) -> Array:
    """Return width and height of a name in pixels."""
    text = ax.text(0.5, 0.5, name, fontsize="small", transform=ax.transAxes)
    size = np.asarray(text.get_window_extent().size)
    text.remove()
    return size


def _places(centre: Array, size: Array, pixels: float) -> list[Place]:
    """Return the places where a name of a size can stand, the nearest first."""
    places = []
    for distance in DISTANCES:
        for direction in DIRECTIONS:
            empty = Place(distance, direction, np.empty((0, 4)))
            way = empty.offset * pixels
            corner = centre + way - size * (1 - np.asarray(empty.sides)) / 2
            boxes = np.concatenate([corner, corner + size])[None] + _around(NAME * pixels)
            if distance > NEAR:
                steps = np.linspace(POINT / distance, 1, max(2, int(distance / LINE / 2)))[:, None]
                line = np.tile(centre + steps * way, 2) + _around(LINE * pixels)
                boxes = np.concatenate([boxes, line])
            places.append(Place(distance, direction, boxes))
    return places


def _around(margin: float) -> Array:
    return margin * np.asarray([-1.0, -1.0, 1.0, 1.0])


def _cost(place: Place, own: Array, taken: Array, inside: Array, pixels: float) -> float:
    """Return the square pixels that are covered or outside, and what the distance costs."""
    name = place.boxes[:1]
    outside = float(np.prod(name[0, 2:] - name[0, :2])) - _shared_area(name, inside[None])
    covered = _shared_area(place.boxes, taken) + _shared_area(name, own[None])
    return covered + outside + FAR * place.distance * pixels**2


def _shared_area(boxes: Array, others: Array) -> float:
    """Return the area that boxes share with others, summed over all pairs."""
    ends = np.minimum(boxes[:, None, 2:], others[:, 2:])
    return float(np.prod((ends - np.maximum(boxes[:, None, :2], others[:, :2])).clip(0), -1).sum())


def _write(ax: Axes, name: str, point: tuple[float, float], place: Place) -> None:
    horizontal, vertical = place.sides
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    start = {"relpos": ((1 - horizontal) / 2, (1 - vertical) / 2)}
    ax.annotate(
        name,
        point,
        xytext=(float(place.offset[0]), float(place.offset[1])),
        textcoords="offset points",
        horizontalalignment=SIDES[horizontal][0],
        verticalalignment=SIDES[vertical][1],
        fontsize="small",
        arrowprops=line | start if place.distance > NEAR else None,
    )
