"""SVG as text: elements, coordinates and paths. The same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Point = tuple[float, float]


def element(name: str, *children: str, **attributes: Any) -> str:
    """An element. Children are markup already, attributes are text; ``class_`` and ``stroke_width`` are
    written without the underscore and with a hyphen.

    >>> element("text", "a", class_="small", x=1.5, text_anchor="end")
    '<text class="small" x="1.5" text-anchor="end">a</text>'
    """
    stated = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(children)
    return f"<{name}{stated}>{inside}</{name}>" if inside else f"<{name}{stated}/>"


def text(content: str, x: float, y: float, anchor: str = "start", class_: str = "") -> str:
    """A line of text, escaped."""
    return element(
        "text",
        escape(content, quote=False),
        x=x,
        y=y,
        text_anchor=None if anchor == "start" else anchor,
        class_=class_ or None,
    )


def tooltip(content: str) -> str:
    """What a browser shows while the pointer is over the parent element."""
    return element("title", escape(content, quote=False))


def coordinate(value: float) -> str:
    """A coordinate with one decimal, which is a tenth of a pixel.

    >>> coordinate(12.0), coordinate(0.25), coordinate(-0.01)
    ('12', '0.2', '0')
    """
    rounded = f"{value:.1f}"
    return "0" if rounded == "-0.0" else rounded.removesuffix(".0")


def polyline(points: Iterable[Point]) -> str:
    """Path data of straight lines through the points; those that round to the one before are left out.

    >>> polyline([(0, 0), (1, 2), (1.01, 2), (3, 4)])
    'M0 0L1 2L3 4'
    """
    kept: list[str] = []
    for x, y in points:
        place = f"{coordinate(x)} {coordinate(y)}"
        if not kept or kept[-1] != place:
            kept.append(place)
    return "M" + "L".join(kept) if kept else ""


def stairs(points: Sequence[Point]) -> list[Point]:
    """The points with a corner between each two: a value holds until the next one.

    >>> stairs([(0, 1), (2, 5)])
    [(0, 1), (2, 1), (2, 5)]
    """
    corners: list[Point] = []
    for x, y in points:
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners


def dots(points: Iterable[Point]) -> str:
    """Path data of one dot per point, drawn by round line caps; each place once.

    >>> dots([(1, 2), (1, 2), (3, 4)])
    'M1 2h0M3 4h0'
    """
    places = dict.fromkeys(f"M{coordinate(x)} {coordinate(y)}h0" for x, y in points)
    return "".join(places)


def _value(value: Any) -> str:
    return coordinate(value) if isinstance(value, float) else str(value)
