"""Profiles of kernels: exact at their points, monotone between, refused when they contradict themselves."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.kernel_table import KernelTable

Points = list[tuple[float, float, float]]


@st.composite
def rising_points(draw: st.DrawFn) -> Points:
    """A grid, some rows of which are cut short, whose times rise in both directions."""
    batches = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=5)))
    contexts = sorted(draw(st.sets(st.integers(0, 200_000), min_size=2, max_size=6)))
    steps = draw(
        st.lists(
            st.floats(0, 1), min_size=len(batches) * len(contexts), max_size=len(batches) * len(contexts)
        )
    )
    grid = [[0.0] * len(contexts) for _ in batches]
    for i in range(len(batches)):
        for j in range(len(contexts)):
            before = max(grid[i - 1][j] if i else 1e-6, grid[i][j - 1] if j else 1e-6)
            grid[i][j] = before + steps[i * len(contexts) + j]
    most = [draw(st.integers(2, len(contexts))) for _ in batches]
    return [(b, c, grid[i][j]) for i, b in enumerate(batches) for j, c in enumerate(contexts) if j < most[i]]


@given(points=rising_points())
def test_every_point_is_met_exactly(points: Points) -> None:
    """To the last bit, in any order of the rows."""
    table = KernelTable.from_points(reversed(points))
    for batch, context, seconds in points:
        assert table.seconds(batch, context) == seconds


@settings(max_examples=200)
@given(points=rising_points(), data=st.data())
def test_time_never_falls_as_context_or_batch_grow_inside(points: Points, data: st.DataObject) -> None:
    """Between any two points that the table covers, one with more of both."""
    table = KernelTable.from_points(points)
    batches = st.floats(table.batches[0], table.batches[-1])
    contexts = st.floats(0, 200_000)
    b1, b2 = sorted((data.draw(batches), data.draw(batches)))
    c1, c2 = sorted((data.draw(contexts), data.draw(contexts)))
    try:
        less, more = table.seconds(b1, c1), table.seconds(b2, c2)
    except PagedKVError as error:
        assert "outside" in str(error)
        return
    assert more >= less * (1 - 1e-12)


@given(points=rising_points(), data=st.data())
def test_extrapolation_never_falls_as_the_context_grows(points: Points, data: st.DataObject) -> None:
    """Below the first point, inside, and beyond the last, at any batch."""
    table = KernelTable.from_points(points, extrapolate=True)
    batch = data.draw(st.floats(0.5, 1000))
    c1, c2 = sorted((data.draw(st.floats(0, 1e6)), data.draw(st.floats(0, 1e6))))
    assert table.seconds(batch, c2) >= table.seconds(batch, c1) * (1 - 1e-12) > 0


GRID: Points = [(1, 100, 1.0), (1, 200, 2.0), (4, 100, 3.0), (4, 200, 8.0)]


class TestRules:
    @pytest.mark.parametrize(
        ("batch", "context", "seconds"),
        [(1, 150, 1.5), (4, 150, 5.5), (2, 100, 1 + 2 / 3), (2.5, 150, 3.5)],
    )
    def test_between_points_it_is_linear(self, batch: float, context: float, seconds: float) -> None:
        """In the context, in the batch, and in both."""
        assert KernelTable.from_points(GRID).seconds(batch, context) == pytest.approx(seconds, rel=1e-12)

    @pytest.mark.parametrize(
        ("batch", "context", "seconds"),
        [
            (1, 400, 4.0),  # the last segment goes on
            (1, 10, 1.0),  # the first value holds
            (8, 100, 6.0),  # in proportion to the batch
            (0.5, 200, 2.0),  # the smallest batch holds
            (4, 300, 13.0),
        ],
    )
    def test_outside_it_follows_the_stated_rule_if_asked_to(
        self, batch: float, context: float, seconds: float
    ) -> None:
        """And raises with the range if not."""
        assert KernelTable.from_points(GRID, extrapolate=True).seconds(batch, context) == pytest.approx(
            seconds
        )
        with pytest.raises(PagedKVError, match=r"outside the table, which has \d+ to \d+"):
            KernelTable.from_points(GRID).seconds(batch, context)

    def test_a_context_that_only_one_neighbour_covers_is_outside(self) -> None:
        """Batch 2 at context 200 needs both rows."""
        with pytest.raises(PagedKVError, match=r"context 200.*at batch 4"):
            KernelTable.from_points(GRID[:3]).seconds(2, 200)

    def test_the_next_knot_is_of_the_rows_in_use(self) -> None:
        """Where the slope may change; none after the last."""
        table = KernelTable.from_points([*GRID, (4, 130, 4.0)])
        assert table.next_knot(1, 100) == 200
        assert table.next_knot(2, 100) == 130
        assert table.next_knot(1, 200) == float("inf")

    @pytest.mark.parametrize(
        ("points", "says"),
        [
            ([], "no points"),
            ([(1, 100, 1.0), (1, 100, 1.0)], "batch 1, context 100 is there twice"),
            ([(1, 100, 2.0), (1, 200, 1.0)], "batch 1, context 200 takes 1 s, less than the 2 s"),
            ([(1, 100, 2.0), (2, 100, 1.0)], "batch 2, context 100 takes 1 s, less than the 2 s"),
            ([(1, 0, 1e-9), (1, 10, 10.0), (2, 0, 1.0), (2, 5, 1.5), (2, 10, 11.0)], "batch 2, context 5"),
            ([(0, 100, 1.0)], "batch 0"),
            ([(1, -1, 1.0)], "context -1"),
            ([(1, 1, 0.0)], "0 s"),
            ([(1, 1, float("nan"))], "nan s"),
            ([(float("inf"), 1, 1.0)], "batch inf"),
        ],
    )
    def test_points_that_make_no_table_are_refused(self, points: Points, says: str) -> None:
        """The numbers are in the message."""
        with pytest.raises(PagedKVError, match=says):
            KernelTable.from_points(points)


class TestCsv:
    def write(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "profile.csv"
        path.write_bytes(text.encode("latin-1"))
        return path

    def test_a_file_is_read_by_the_names_of_its_columns(self, tmp_path: Path) -> None:
        """In any order, beside others."""
        path = self.write(tmp_path, "note,seconds,batch,context\nx,0.5,1,10\ny,1.5,1,20\n")
        assert KernelTable.from_csv(path).seconds(1, 15) == 1.0

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "no column batch, context, seconds"),
            ("batch,context\n1,2\n", "no column seconds"),
            ("batch,context,seconds\n1,2,x\n", "line 2: no numbers.*'x'"),
            ("batch,context,seconds\n1,2\n", "line 2: no numbers"),
            ("batch,context,seconds\n", "no points"),
            ("batch,context,seconds\n1,2,\xff\xfe\n", "no table"),
            ("batch,context,seconds\n1,2,-1\n", "-1 s"),
        ],
    )
    def test_a_damaged_file_is_refused_with_its_name(self, tmp_path: Path, text: str, says: str) -> None:
        """And the line, where one is to blame."""
        with pytest.raises(PagedKVError, match=f"profile.csv.*{says}"):
            KernelTable.from_csv(self.write(tmp_path, text))
