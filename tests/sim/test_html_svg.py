"""Charts as SVG: ticks are round and inside, everything drawn is inside the picture, texts do not touch."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.sim.output.svg import dots, element, polyline, text
from pagedkv.sim.output.svg_axis import Axis, axis_over, short
from pagedkv.sim.output.svg_chart import HEIGHT, LEFT, LETTER, RIGHT, WIDTH, Chart

SIZES = st.floats(1e-9, 1e15, allow_nan=False)


class TestAxis:
    @settings(max_examples=300, deadline=None)
    @given(low=st.sampled_from([0.0, 0.0, 3.0, 1e6]), size=SIZES)
    def test_ticks_are_few_and_inside(self, low: float, size: float) -> None:
        """Two to seven, evenly spaced, each with a text of its own that is its value."""
        axis = Axis("x", low, low + max(size, low * 1e-3))
        ticks = axis.ticks()
        values = [value for value, _ in ticks]
        assert 2 <= len(ticks) <= 8
        assert len({label for _, label in ticks}) == len(ticks)
        tolerance = 1e-6 * (axis.high - axis.low)
        assert all(axis.low - tolerance <= value <= axis.high + tolerance for value in values)
        for value, label in ticks:
            number = float(label.rstrip("kMGT").replace(",", "")) * 1000 ** " kMGT".index(
                label[-1:].strip("0123456789") or " "
            )
            assert number == pytest.approx(value, rel=1e-6, abs=tolerance)

    @settings(max_examples=200, deadline=None)
    @given(low=st.floats(1e-6, 1e6), factor=st.floats(1.01, 1e9))
    def test_logarithmic_ticks_are_inside_and_increase(self, low: float, factor: float) -> None:
        """At least two, at most seven."""
        axis = Axis("x", low, low * factor, log=True)
        values = [value for value, _ in axis.ticks()]
        assert 2 <= len(values) <= 7
        assert values == sorted(set(values))
        assert all(low * 0.999 <= value <= low * factor * 1.001 for value in values)

    @given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
    def test_places_are_from_0_to_1_and_in_order(self, low: float, size: float) -> None:
        """Also of values outside."""
        axis = Axis("x", low, low + size)
        places = [axis.place(low + size * share) for share in (-1, 0, 0.25, 1, 2)]
        assert places == sorted(places)
        assert (places[0], places[-1]) == (0, 1)

    def test_counts_have_whole_ticks(self) -> None:
        """Nobody waits 0.2 times."""
        assert [label for _, label in axis_over("n", [0, 0], whole=True).ticks()] == ["0", "1"]
        assert [label for _, label in axis_over("n", [3], whole=True).ticks()] == ["0", "1", "2", "3"]

    def test_a_logarithm_of_nothing_is_refused(self) -> None:
        """With the value."""
        with pytest.raises(ValueError, match="above 0, got 0"):
            Axis("x", 0, 1, log=True)

    def test_an_axis_of_no_length_gets_one(self) -> None:
        """A run of one moment has a time axis."""
        assert Axis("x", 2, 2).high > 2
        assert Axis("x", 2, 2, log=True).high > 2

    @pytest.mark.parametrize(
        ("value", "told"), [(999.7, "1k"), (999_900, "1M"), (-2000, "-2k"), (1e-5, "1e-05")]
    )
    def test_short_numbers(self, value: float, told: str) -> None:
        """Rounding does not make 1000k."""
        assert short(value) == told


class TestElements:
    def test_text_is_escaped(self) -> None:
        """In content and in attributes."""
        made = element("g", text('<&">', 1, 2), aria_label='a"<b')
        assert ElementTree.fromstring(made)[0].text == '<&">'
        assert ElementTree.fromstring(made).attrib == {"aria-label": 'a"<b'}

    def test_no_points_draw_nothing(self) -> None:
        """Neither a line nor a dot."""
        assert polyline([]) == dots([]) == ""


def busy_chart(marks: list[float]) -> Chart:
    chart = Chart("busy", Axis("time [s]", 0, 100), Axis("bytes [GiB]", 0, 10))
    chart.stack([0, 50, 100], [("c1", "a", [1, 2, 3]), ("c2", "b", [0, 1, 0])])
    chart.line([0, 50, 100], [1, None, 20], "c3", "broken, and higher than the plot")
    chart.dots([10, 20], [5, -5], "c4", "dots")
    for mark in marks:
        chart.mark("x", mark, f"p{mark:.0f} {mark:.4g}")
    chart.mark("y", 9, "capacity 9 GiB")
    chart.tell([0, 50, 100], ["one", "two <", "three"])
    return chart


class TestChart:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(0, 100), max_size=6))
    def test_everything_is_inside_the_picture(self, marks: list[float]) -> None:
        """Lines, areas, dots, rectangles and the beginnings of texts."""
        root = ElementTree.fromstring(busy_chart(marks).svg())
        for path in root.iter("path"):
            for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.attrib["d"]):
                assert -0.1 <= float(x) <= WIDTH + 0.1 and -0.1 <= float(y) <= HEIGHT + 0.1
        for rect in root.iter("rect"):
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= WIDTH - RIGHT + 0.2
        for label in root.iter("text"):
            left, right = extent(label)
            assert left >= -1 and right <= WIDTH + 1

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.floats(0, 100), max_size=6))
    def test_texts_of_marks_do_not_touch(self, marks: list[float]) -> None:
        """Of one row, none begins before the one left of it ends."""
        root = ElementTree.fromstring(busy_chart(marks).svg())
        rows: dict[str, list[tuple[float, float]]] = {}
        for label in root.iter("text"):
            if label.attrib.get("class") == "on" and (label.text or "").startswith("p"):
                rows.setdefault(label.attrib["y"], []).append(extent(label))
        for row in rows.values():
            row.sort()
            assert all(a[1] <= b[0] + 0.2 for a, b in pairwise(row))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.floats(0, 60), max_size=6, unique_by=round))
    def test_lines_of_marks_cross_no_text(self, marks: list[float]) -> None:
        """Where there is room to the right: a line begins at its own row, below the texts it would cross."""
        root = ElementTree.fromstring(busy_chart(marks).svg())
        lines = [re.findall(r"M([\d.]+) ([\d.]+)V", p.attrib["d"]) for p in root.iter("path")]
        for label in root.iter("text"):
            if label.attrib.get("class") == "on" and (label.text or "").startswith("p"):
                left, right = extent(label)
                for x, y in (line[0] for line in lines if line):
                    assert not (left < float(x) < right and float(y) < float(label.attrib["y"]) - 9)

    def test_the_pointer_is_told_everywhere(self) -> None:
        """The bands cover the plot without a gap, and carry the texts."""
        root = ElementTree.fromstring(busy_chart([]).svg())
        bands = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in root.iter("rect")]
        assert bands[0][0] == LEFT
        assert sum(width for _, width in bands) == pytest.approx(WIDTH - LEFT - RIGHT, abs=0.3)
        assert [r[0].text for r in root.iter("rect")] == ["one", "two <", "three"]

    def test_a_line_breaks_where_there_is_no_value(self) -> None:
        """Two pieces of one point each."""
        root = ElementTree.fromstring(busy_chart([]).svg())
        (line,) = [p for p in root.iter("path") if p.attrib.get("class") == "line c3"]
        assert line.attrib["d"].count("M") == 2


def extent(label: ElementTree.Element) -> tuple[float, float]:
    """From where to where a text goes, if each letter takes the most it may."""
    x, width = float(label.attrib["x"]), LETTER * len(label.text or "")
    anchor = label.attrib.get("text-anchor", "start")
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return left, left + width
