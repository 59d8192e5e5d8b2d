"""One chart as SVG: axes, grid, areas, lines, dots, marks with text, and what a pointer is told.

Colours are classes (``c1`` ... ``c5``), so that the page decides them for light, dark and print. The legend
is not in the picture: a page can wrap its text, a picture cannot.

    y label                 rows of marks
    |----------------------------------|
    |  plot                            |
    |----------------------------------|
    ticks
                                 x label
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pagedkv.sim.output.svg import Point, dots, element, polyline, stairs, text, tooltip
from pagedkv.sim.output.svg_axis import Axis

WIDTH, HEIGHT = 440.0, 284.0
LEFT, RIGHT, BOTTOM, TOP, ROW = 48.0, 14.0, 47.0, 30.0, 16.0
LETTER = 7.2
"""Most that a letter of a mark takes on average, in pixels of the picture: text is larger on a phone."""

Shape = Literal["area", "line", "dash", "dot"]


class Key(NamedTuple):
    """An entry of the legend."""

    colour: str
    shape: Shape
    label: str


class _Mark(NamedTuple):
    axis: Literal["x", "y"]
    value: float
    label: str
    colour: str


class Chart:
    """A chart under construction; ``svg`` draws it."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        """Start with the axes alone."""
        self.title, self.x, self.y = title, x, y
        self.keys: list[Key] = []
        self._layers: list[tuple[str, Shape, list[list[Point]], str]] = []
        self._marks: list[_Mark] = []
        self._bands: list[tuple[float, float, str]] = []

    def stack(self, x: Sequence[float], series: Sequence[tuple[str, str, Sequence[float]]]) -> None:
        """Areas one upon the other, from (colour, label, values); a value holds until the next x."""
        below = [0.0] * len(x)
        for colour, label, values in series:
            above = [b + v for b, v in zip(below, values, strict=True)]
            outline = [
                stairs(list(zip(x, above, strict=True))),
                stairs(list(zip(x, below, strict=True)))[::-1],
            ]
            self._layers.append((colour, "area", [outline[0] + outline[1]], label))
            self.keys.append(Key(colour, "area", label))
            below = above

    def line(
        self,
        x: Sequence[float],
        y: Sequence[float | None],
        colour: str,
        label: str,
        *,
        dashed: bool = False,
        steps: bool = False,
    ) -> None:
        """A line through the points, broken where y is None; with ``steps``, y holds until the next x."""
        pieces: list[list[Point]] = [[]]
        for a, b in zip(x, y, strict=True):
            if b is None:
                pieces.append([])
            else:
                pieces[-1].append((a, b))
        shape: Shape = "dash" if dashed else "line"
        drawn = [stairs(piece) if steps else piece for piece in pieces if piece]
        self._layers.append((colour, shape, drawn, label))
        self.keys.append(Key(colour, shape, label))

    def dots(self, x: Sequence[float], y: Sequence[float], colour: str, label: str) -> None:
        """One dot per point."""
        self._layers.append((colour, "dot", [list(zip(x, y, strict=True))], label))
        self.keys.append(Key(colour, "dot", label))

    def mark(self, axis: Literal["x", "y"], value: float, label: str, colour: str = "ink") -> None:
        """A dashed line across the plot at a value of an axis, with text: above the plot, or on the line."""
        self._marks.append(_Mark(axis, value, label, colour))

    def tell(self, x: Sequence[float], texts: Sequence[str]) -> None:
        """Say a text while the pointer is nearest to an x; x increases."""
        if not x:
            return
        edges = [(a + b) / 2 for a, b in pairwise(x)]
        starts, stops = [self.x.low, *edges], [*edges, self.x.high]
        self._bands.extend(zip(starts, stops, texts, strict=True))

    def svg(self) -> str:
        """The picture; its description is the title and what the axes show."""
        rows = self._rows()
        top = TOP + ROW * (max(rows, default=-1) + 1)
        parts = [self._grid(top), *(self._layer(*layer, top) for layer in self._layers)]
        parts.extend(self._drawn_mark(mark, row, top) for mark, row in zip(self._marks, rows, strict=True))
        parts.extend(self._band(*band, top) for band in self._bands)
        about = f"{self.title}: {self.y.label} against {self.x.label}"
        return element(
            "svg",
            *parts,
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            role="img",
            aria_label=about,
        )

    # -- places

    def _at_x(self, value: float) -> float:
        return LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)

    def _at_y(self, value: float, top: float) -> float:
        return HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - BOTTOM - top)

    def _rows(self) -> list[int]:
        """The row above the plot of each mark's text, so that no two texts touch; -1 without such text.

        From the right to the left, each goes above all that it reaches: a line then crosses no text that
        stands right of its own line.
        """
        levels: dict[int, int] = {}
        extents = [self._extent(mark) for mark in self._marks]
        for i in sorted(range(len(extents)), key=lambda i: (-self._marks[i].value, -i)):
            if self._marks[i].axis == "x":
                start, stop = extents[i]
                reached = [v for j, v in levels.items() if start < extents[j][1] and extents[j][0] < stop]
                levels[i] = max(reached, default=-1) + 1
        top = max(levels.values(), default=-1)
        return [top - levels[i] if i in levels else -1 for i in range(len(extents))]

    def _extent(self, mark: _Mark) -> tuple[float, float]:
        """From where to where the text of a mark goes: right of its line, left of it, or where it fits."""
        x, width = self._at_x(mark.value), LETTER * len(mark.label) + 8
        if x + width <= WIDTH:
            return x - 3, x + width
        return (x - width, x + 3) if x - width >= 0 else (WIDTH - width, WIDTH)

    # -- parts

    def _grid(self, top: float) -> str:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = [text(self.y.label, 0.0, 16.0, class_="label")]
        for value, label in self.y.ticks():
            y = self._at_y(value, top)
            parts.append(element("path", class_="grid", d=f"M{LEFT:g} {y:.1f}H{right:g}"))
            parts.append(text(label, LEFT - 6, y + 4, "end"))
        for value, label in self.x.ticks():
            x = self._at_x(value)
            parts.append(element("path", class_="grid", d=f"M{x:.1f} {bottom:g}v4"))
            half = LETTER * len(label) / 2
            parts.append(text(label, min(x, WIDTH - half), bottom + 21, "middle"))
        parts.append(element("path", class_="axis", d=f"M{LEFT:g} {bottom:g}H{right:g}"))
        parts.append(text(self.x.label, right, HEIGHT - 6, "end", "label"))
        return "".join(parts)

    def _layer(self, colour: str, shape: Shape, pieces: list[list[Point]], label: str, top: float) -> str:
        placed = [[(self._at_x(x), self._at_y(y, top)) for x, y in piece] for piece in pieces]
        data = "".join(dots(piece) if shape == "dot" else polyline(piece) for piece in placed)
        if not data:
            return ""
        close = "Z" if shape == "area" else ""
        return element("path", tooltip(label), class_=f"{shape} {colour}", d=data + close)

    def _drawn_mark(self, mark: _Mark, row: int, top: float) -> str:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        if mark.axis == "y":
            y = self._at_y(mark.value, top)
            line = element("path", class_=f"mark {mark.colour}", d=f"M{LEFT:g} {y:.1f}H{right:g}")
            return line + text(mark.label, right - 4, y - 5, "end", "on")
        x = self._at_x(mark.value)
        start, stop = self._extent(mark)
        base = TOP + ROW * row + 8
        line = element("path", class_=f"mark {mark.colour}", d=f"M{x:.1f} {base - 9:g}V{bottom:g}")
        if start == x - 3:
            return line + text(mark.label, x + 4, base, class_="on")
        return line + text(mark.label, x - 4 if stop == x + 3 else stop, base, "end", "on")

    def _band(self, start: float, stop: float, told: str, top: float) -> str:
        left, right = self._at_x(start), self._at_x(stop)
        return element(
            "rect",
            tooltip(told),
            class_="tell",
            x=left,
            y=top,
            width=max(right - left, 0.1),
            height=HEIGHT - BOTTOM - top,
        )
